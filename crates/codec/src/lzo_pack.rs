//! LZO1X, the packing side.
//!
//! Written from the description of the stream: instructions of literals and of matches, told apart
//! by their first byte. Hidden here: how matches are found (greedily, with a table of the last
//! place of each hash of four bytes, in longer steps the longer nothing is found), and that two
//! bits of each match say how many single bytes follow it. Only what pays within one sector is
//! written, for btrfs packs no more than that at once: near matches (up to 2 KiB back, up to 8
//! bytes) in two bytes, all others in three and more.
//!
//! `lzokay` unpacks for us, but does not pack. In sectors of 4 KiB, on source text, programs and
//! tables, its compressor gives 26 to 60 % of the size at 35 to 70 MB/s, this one 36 to 70 % at 270
//! to 530 MB/s. Lzo is chosen for its speed; for size there is zstd, which beats both (18 to 55 %
//! at 420 to 690 MB/s for level 1, in whole extents). The crates with a fast compressor (`lzo1x`,
//! `rust-lzo`) are under the GPL.

/// Shortest match that is looked for.
const MIN_MATCH: usize = 4;
const TABLE_BITS: u32 = 12;
/// Furthest that a match of two bytes reaches.
const NEAR: usize = 2048;
/// Longest match of two bytes.
const NEAR_LEN: usize = 8;
/// Longest match whose length is in its first byte.
const FAR_LEN: usize = 33;
/// Longest run of literals whose length is in its first byte.
const RUN: usize = 18;
/// Longest run whose length is in the first byte of the stream.
const FIRST_RUN: usize = 238;
/// Most bytes that are passed over at once.
const MAX_SKIP: usize = 7;
/// Ends the stream.
const END: [u8; 3] = [17, 0, 0];

/// Where the next four bytes were last seen: the place and one, by their hash.
#[derive(Debug)]
pub(super) struct Table(Box<[u16; 1 << TABLE_BITS]>);

impl Default for Table {
    fn default() -> Self {
        Self(Box::new([0; 1 << TABLE_BITS]))
    }
}

fn word(data: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(data[at..at + 4].try_into().expect("four bytes"))
}

fn hash(word: u32) -> usize {
    (word.wrapping_mul(0x9e37_79b1) >> (32 - TABLE_BITS)) as usize
}

/// Appends `data`, packed, to `out`.
///
/// # Panics
/// If `data` is empty or longer than 16 KiB: places would not fit.
pub(super) fn pack(data: &[u8], out: &mut Vec<u8>, table: &mut Table) {
    assert!(!data.is_empty() && data.len() <= 16 << 10, "a sector at a time");
    let heads = &mut table.0;
    heads.fill(0);
    let begin = out.len();
    let mut done = 0;
    let mut at = 0;
    while at + MIN_MATCH <= data.len() {
        let here = word(data, at);
        let head = &mut heads[hash(here)];
        let seen = usize::from(*head);
        *head = u16::try_from(at + 1).expect("at most 16 KiB");
        if seen == 0 || word(data, seen - 1) != here {
            at += 1 + ((at - done) >> 5).min(MAX_SKIP);
            continue;
        }
        let from = seen - 1;
        let more = data[at + MIN_MATCH..].iter().zip(&data[from + MIN_MATCH..]);
        let len = MIN_MATCH + more.take_while(|(a, b)| a == b).count();
        literals(&data[done..at], begin, out);
        matched(len, at - from, out);
        at += len;
        done = at;
    }
    literals(&data[done..], begin, out);
    out.extend(END);
}

/// A length beyond what an instruction's first byte holds.
fn long(mut rest: usize, out: &mut Vec<u8>) {
    while rest > 255 {
        out.push(0);
        rest -= 255;
    }
    out.push(u8::try_from(rest).expect("at most 255"));
}

/// Bytes that are not in a match. `begin` is where the stream begins in `out`.
fn literals(run: &[u8], begin: usize, out: &mut Vec<u8>) {
    let byte = |n: usize| u8::try_from(n).expect("within the instruction");
    match run.len() {
        0 => return,
        n if out.len() == begin && n <= FIRST_RUN => out.push(byte(17 + n)),
        // The match before says how many. Its last byte but one has the room.
        n @ 1..=3 => {
            let at = out.len() - 2;
            out[at] |= byte(n);
        }
        n if n <= RUN => out.push(byte(n - 3)),
        n => {
            out.push(0);
            long(n - RUN, out);
        }
    }
    out.extend_from_slice(run);
}

fn matched(len: usize, distance: usize, out: &mut Vec<u8>) {
    let byte = |n: usize| u8::try_from(n).expect("within the instruction");
    let back = distance - 1;
    if len <= NEAR_LEN && distance <= NEAR {
        out.push(byte((len - 1) << 5 | (back & 7) << 2));
        out.push(byte(back >> 3));
        return;
    }
    if len <= FAR_LEN {
        out.push(byte(32 | (len - 2)));
    } else {
        out.push(32);
        long(len - FAR_LEN, out);
    }
    out.push(byte((back << 2) & 0xff));
    out.push(byte(back >> 6));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn back(data: &[u8]) -> usize {
        let mut out = vec![9, 9];
        pack(data, &mut out, &mut Table::default());
        let mut again = vec![0; data.len() + 10];
        let n = lzokay::decompress::decompress(&out[2..], &mut again).unwrap();
        assert_eq!(&again[..n], data);
        out.len() - 2
    }

    #[test]
    fn every_length_of_runs_and_matches() {
        let mut seed = 1u32;
        let mut noise = |n: usize| -> Vec<u8> {
            (0..n)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (seed >> 24) as u8
                })
                .collect()
        };
        for n in 1..600 {
            let run = noise(n);
            back(&run);
            back(&vec![7; n]);
            // A match of n bytes from near and from far, then a run.
            let mut data = run.clone();
            data.extend(noise(if n % 2 == 0 { 5 } else { 2500 }));
            data.extend(&run);
            data.extend(noise(n % 23));
            back(&data);
        }
        for n in [4096, 4095, 4097, 16 << 10] {
            assert!(back(&vec![0; n]) < 100);
            let worst = noise(n);
            assert!(back(&worst) <= n + n / 16 + 64 + 3);
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_comes_back(mut data in crate::repeating(40, 60)) {
            data.truncate(16 << 10);
            back(&data);
        }
    }
}
