//! The parity of RAID5 and RAID6: making it, and rebuilding lost columns of a row from it.
//!
//! Of a row with the columns `D0`, `D1`, … a byte of P is the sum of their bytes, and a byte of Q
//! is the sum of `2^i · Di`. Sums and products are those of the field with 256 elements and the
//! polynomial `x^8 + x^4 + x^3 + x^2 + 1` (0x11d): a sum is an exclusive or, so adding and
//! subtracting are the same. P gives back one lost column, Q as well, and both together two.
//!
//! Q is worked out from the last column to the first: double what there is, add the next column.
//! That takes no table, and compilers turn it into vector instructions. A table is needed only for
//! the factor at the end of a rebuild.

/// Which element of a row is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// The column of this number.
    Column(usize),
    /// The sum of all columns.
    P,
    /// The sum of all columns, each with its factor.
    Q,
}

/// From what a column is rebuilt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// P and all other columns.
    P,
    /// Q and all other columns.
    Q,
    /// P, Q and all other columns but this one.
    Without(usize),
}

/// Twice each byte.
pub(crate) fn double(bytes: &mut [u8]) {
    for b in bytes {
        *b = (*b << 1) ^ ((*b >> 7) * 0x1d);
    }
}

/// Adds the bytes of `other`.
pub(crate) fn add(bytes: &mut [u8], other: &[u8]) {
    for (b, o) in bytes.iter_mut().zip(other) {
        *b ^= o;
    }
}

/// The product of two elements of the field.
const fn product(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut sum) = (a, b, 0);
    while b != 0 {
        if b & 1 != 0 {
            sum ^= a;
        }
        a = (a << 1) ^ ((a >> 7) * 0x1d);
        b >>= 1;
    }
    sum
}

/// `a` to the power of `n`.
const fn power(a: u8, n: u32) -> u8 {
    let (mut left, mut result) = (n, 1);
    while left > 0 {
        result = product(result, a);
        left -= 1;
    }
    result
}

/// What times `a` is 1; `a` is not 0.
const fn inverse(a: u8) -> u8 {
    power(a, 254)
}

/// The factor of a column in Q. They repeat after 255 columns, and no row has so many.
fn factor(column: usize) -> u8 {
    power(2, u32::try_from(column % 255).expect("less than 255"))
}

/// Multiplies each byte.
fn multiply(bytes: &mut [u8], factor: u8) {
    if factor == 1 {
        return;
    }
    let mut table = [0; 256];
    for (n, entry) in (0..=u8::MAX).zip(&mut table) {
        *entry = product(n, factor);
    }
    for b in bytes {
        *b = table[usize::from(*b)];
    }
}

/// Fills `p` with the parity of the columns, all of its length.
pub fn p_of(columns: &[&[u8]], p: &mut [u8]) {
    p.fill(0);
    for column in columns {
        add(p, column);
    }
}

/// Fills `q` with the second parity of the columns, all of its length.
pub fn q_of(columns: &[&[u8]], q: &mut [u8]) {
    q.fill(0);
    for column in columns.iter().rev() {
        double(q);
        add(q, column);
    }
}

/// Fills `out` with a column of a row of `columns` columns. `read` fills a buffer with another
/// element of the row; each is read once.
///
/// # Errors
/// The first of `read`; then `out` holds anything.
pub fn rebuild<E>(
    column: usize,
    by: By,
    columns: usize,
    out: &mut [u8],
    mut read: impl FnMut(Element, &mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut buffer = vec![0; out.len()];
    let second = if let By::Without(other) = by { Some(other) } else { None };
    let known = |n: usize| n != column && Some(n) != second;
    if by == By::P {
        read(Element::P, out)?;
        for other in (0..columns).filter(|n| known(*n)) {
            read(Element::Column(other), &mut buffer)?;
            add(out, &buffer);
        }
        return Ok(());
    }
    // What Q, and P, have of the lost columns alone.
    let mut sum = second.map(|_| vec![0; out.len()]);
    out.fill(0);
    for other in (0..columns).rev() {
        double(out);
        if known(other) {
            read(Element::Column(other), &mut buffer)?;
            add(out, &buffer);
            if let Some(sum) = &mut sum {
                add(sum, &buffer);
            }
        }
    }
    read(Element::Q, &mut buffer)?;
    add(out, &buffer);
    let Some((mut sum, second)) = sum.zip(second) else {
        multiply(out, inverse(factor(column)));
        return Ok(());
    };
    read(Element::P, &mut buffer)?;
    add(&mut sum, &buffer);
    // Times its factor, the sum has as much of the second lost column as Q has.
    multiply(&mut sum, factor(second));
    add(out, &sum);
    multiply(out, inverse(factor(column) ^ factor(second)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_field_is_one() {
        let mut powers: Vec<u8> = (0..255).map(|n| power(2, n)).collect();
        assert_eq!(powers[8], 0x1d);
        powers.sort_unstable();
        assert!(powers.iter().copied().eq(1..=255), "2 generates every element but 0");
        assert!((1..=255).all(|a| product(a, inverse(a)) == 1));
    }

    /// A row of columns of equal length, with its parities.
    fn rows() -> impl Strategy<Value = (Vec<Vec<u8>>, Vec<u8>, Vec<u8>)> {
        let columns = |len| prop::collection::vec(prop::collection::vec(any::<u8>(), len), 1..20);
        (1usize..80).prop_flat_map(columns).prop_map(|columns| {
            let refs: Vec<&[u8]> = columns.iter().map(Vec::as_slice).collect();
            let (mut p, mut q) = (vec![1; columns[0].len()], vec![2; columns[0].len()]);
            p_of(&refs, &mut p);
            q_of(&refs, &mut q);
            (columns, p, q)
        })
    }

    proptest! {
        #[test]
        fn q_has_each_column_times_its_factor((columns, _, q) in rows()) {
            for (n, byte) in q.iter().enumerate() {
                let terms = columns.iter().enumerate().map(|(i, c)| product(c[n], factor(i)));
                prop_assert_eq!(*byte, terms.fold(0, |sum, term| sum ^ term));
            }
        }

        /// Whichever one or two elements are lost, every column comes back, and nothing that is
        /// lost is asked for.
        #[test]
        fn one_or_two_lost_come_back((columns, p, q) in rows()) {
            let mut elements: Vec<Element> = (0..columns.len()).map(Element::Column).collect();
            elements.extend([Element::P, Element::Q]);
            for (i, a) in elements.iter().enumerate() {
                for b in &elements[i..] {
                    let lost = |e: Element| e == *a || e == *b;
                    for column in (0..columns.len()).filter(|n| lost(Element::Column(*n))) {
                        let other = (0..columns.len())
                            .find(|n| *n != column && lost(Element::Column(*n)));
                        let by = match other {
                            Some(other) => By::Without(other),
                            None if lost(Element::P) => By::Q,
                            None => By::P,
                        };
                        let mut out = vec![0xee; p.len()];
                        let mut asked = Vec::new();
                        rebuild(column, by, columns.len(), &mut out, |element, buf| {
                            asked.push(element);
                            buf.copy_from_slice(match element {
                                _ if lost(element) => return Err(element),
                                Element::Column(n) => &columns[n],
                                Element::P => &p,
                                Element::Q => &q,
                            });
                            Ok(())
                        }).unwrap();
                        prop_assert_eq!(&out, &columns[column]);
                        let all = asked.len();
                        asked.dedup();
                        prop_assert_eq!(asked.len(), all);
                    }
                }
            }
        }
    }
}
