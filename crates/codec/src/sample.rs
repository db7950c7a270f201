//! Is it worth trying to compress this?
//!
//! Most data that does not shrink is recognised from a few samples, which costs a hundredth of the
//! attempt. Two measures, both from the literature on real-time compression (Harnik et al., "To Zip
//! or not to Zip", FAST '13): the entropy of single bytes, which bounds what a Huffman coder can
//! save, and how many short strings occur again, which is what the others live on. Data is given up
//! only where both say no.

/// Bytes that are looked at in one place.
const SAMPLE: usize = 16;
/// Distance between these places.
const STRIDE: usize = 256;
/// Up to this length everything is looked at.
const ALL: usize = 8 << 10;
/// So few different bytes always compress.
const FEW_SYMBOLS: usize = 64;
/// Bits per byte below which a Huffman coder alone saves a tenth.
const LOW_ENTROPY: f32 = 7.2;
/// One in so many places has to continue with four bytes that occurred before.
const REPEATS: usize = 32;

const TABLE_BITS: u32 = 13;

/// Does `data` look as if it would become smaller?
#[must_use]
pub fn promising(data: &[u8]) -> bool {
    if data.len() <= ALL {
        return judge(data);
    }
    let mut samples = [0; ALL];
    let mut len = 0;
    // More data is sampled more thinly.
    let stride = STRIDE.max(data.len().div_ceil(ALL / SAMPLE));
    for place in data.chunks(stride) {
        let n = place.len().min(SAMPLE).min(ALL - len);
        samples[len..len + n].copy_from_slice(&place[..n]);
        len += n;
    }
    judge(&samples[..len])
}

fn judge(samples: &[u8]) -> bool {
    let mut counts = [0u16; 256];
    for b in samples {
        counts[usize::from(*b)] += 1;
    }
    let symbols = counts.iter().filter(|c| **c > 0).count();
    // A short sample cannot have many different bytes, whatever it is of.
    (symbols < FEW_SYMBOLS && symbols * 2 < samples.len())
        || entropy(&counts, samples.len()) < LOW_ENTROPY.min(bits(samples.len()) * 0.9)
        || repeats(samples) * REPEATS > samples.len()
}

#[allow(clippy::cast_precision_loss)]
fn bits(n: usize) -> f32 {
    (n.max(2) as f32).log2()
}

/// Bits per byte.
#[allow(clippy::cast_precision_loss)]
fn entropy(counts: &[u16; 256], n: usize) -> f32 {
    let n = n.max(1) as f32;
    counts.iter().filter(|c| **c > 0).map(|c| f32::from(*c) / n).map(|p| -p * p.log2()).sum()
}

/// Places whose next four bytes were seen before.
fn repeats(samples: &[u8]) -> usize {
    let mut seen = [0u32; 1 << TABLE_BITS];
    let mut found = 0;
    for window in samples.windows(4) {
        let word = u32::from_le_bytes([window[0], window[1], window[2], window[3]]);
        let slot = &mut seen[(word.wrapping_mul(0x9e37_79b1) >> (32 - TABLE_BITS)) as usize];
        // A word of zeros counts as seen from the start; so be it.
        found += usize::from(*slot == word);
        *slot = word;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; len];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        bytes
    }

    #[test]
    fn noise_is_given_up_and_text_is_not() {
        for len in [2000, 4096, 20_000, 131_072] {
            for seed in 1..20 {
                assert!(!promising(&noise(len, seed)), "{len} {seed}");
            }
            let text: Vec<u8> =
                (0..len).map(|i| b"the quick brown fox "[i % 20] ^ u8::from(i % 97 == 0)).collect();
            assert!(promising(&text));
            assert!(promising(&vec![0; len]));
            let hex: Vec<u8> =
                noise(len, 99).iter().map(|b| b"0123456789abcdef"[usize::from(b % 16)]).collect();
            assert!(promising(&hex));
        }
        assert!(promising(&[7; 100]));
    }

    #[test]
    fn noise_that_repeats_is_tried() {
        let piece = noise(1024, 5);
        let data: Vec<u8> = piece.iter().copied().cycle().take(131_072).collect();
        assert!(promising(&data));
    }

    #[test]
    fn nothing_is_too_short_to_be_asked_about() {
        for len in 0..300 {
            let _ = promising(&noise(len, 3));
        }
    }
}
