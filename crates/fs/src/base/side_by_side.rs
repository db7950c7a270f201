//! Work on many things by a few threads that live as long as it lasts.

use super::error::Result;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Does `work` with each of these, `threads` at the same time at most. The results are in the order
/// of the things. After an error nothing more is begun.
///
/// # Errors
/// An error of `work`.
pub(crate) fn side_by_side<I: Sync, T: Send>(
    things: &[I],
    threads: usize,
    work: impl Fn(&I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let some = || {
        let mut done = Vec::new();
        while let Some((n, thing)) = take(things, &next) {
            let result = work(thing).inspect_err(|_| next.store(things.len(), Ordering::Relaxed));
            done.push((n, result?));
        }
        Ok(done)
    };
    let results: Vec<Result<Vec<(usize, T)>>> = thread::scope(|scope| {
        let others: Vec<_> = (1..threads.min(things.len())).map(|_| scope.spawn(some)).collect();
        let mine = some();
        let join = |t: thread::ScopedJoinHandle<'_, _>| {
            t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        others.into_iter().map(join).chain([mine]).collect()
    });
    let mut done: Vec<(usize, T)> =
        results.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    done.sort_unstable_by_key(|(n, _)| *n);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

fn take<'i, I>(things: &'i [I], next: &AtomicUsize) -> Option<(usize, &'i I)> {
    let n = next.fetch_add(1, Ordering::Relaxed);
    things.get(n).map(|thing| (n, thing))
}

#[cfg(test)]
mod tests {
    use super::super::error::Error;
    use super::*;

    #[test]
    fn results_are_in_order_and_an_error_is_passed_on() {
        let things: Vec<usize> = (0..500).collect();
        let squares = side_by_side(&things, 4, |n| Ok(n * n)).unwrap();
        assert!(squares.iter().enumerate().all(|(n, square)| *square == n * n));
        assert_eq!(squares.len(), things.len());
        assert!(side_by_side(&[0; 0], 4, |_: &i32| Ok(())).unwrap().is_empty());
        let one_fails = |n: &usize| if *n == 300 { Err(Error::NoSpace) } else { Ok(()) };
        assert!(matches!(side_by_side(&things, 3, one_fails), Err(Error::NoSpace)));
    }
}
