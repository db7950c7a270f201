//! The framing that btrfs puts around LZO1X data.
//!
//! A stream is a total length (which counts itself), then segments: a length and LZO1X data that
//! unpacks to at most one sector. What must be known and is hidden here: a segment's length never
//! straddles a sector boundary of the stream; where fewer than four bytes are left, they are
//! skipped.

use super::CodecError;
use super::lzo_pack::{Table, pack};
use larder_format::SECTOR_SIZE;

const SECTOR: usize = SECTOR_SIZE as usize;
const LEN: usize = 4;
/// Most that LZO1X makes of a sector that does not shrink.
const MAX_SEGMENT: usize = SECTOR + SECTOR / 16 + 64 + 3;

fn read_len(input: &[u8], at: usize) -> Result<usize, CodecError> {
    let bytes = input.get(at..at + LEN).ok_or(CodecError("lzo stream ends within a length"))?;
    Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize)
}

/// Unpacks a stream; the number of bytes that came out, at most `out.len()`.
///
/// # Errors
/// The stream is damaged.
pub(super) fn decompress(input: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    let total = read_len(input, 0)?;
    let input = input.get(..total).ok_or(CodecError("lzo stream is longer than its extent"))?;
    let (mut at, mut done) = (LEN, 0);
    while at < input.len() && done < out.len() {
        let left = SECTOR - at % SECTOR;
        if left < LEN {
            at += left;
            if at >= input.len() {
                break;
            }
        }
        let len = read_len(input, at)?;
        if len > MAX_SEGMENT {
            return Err(CodecError("lzo segment is too long"));
        }
        at += LEN;
        let segment = input.get(at..at + len).ok_or(CodecError("lzo segment leaves its stream"))?;
        at += len;
        done += unpack(segment, &mut out[done..])?;
    }
    Ok(done)
}

/// Unpacks one segment: all of a sector, or as much as there is room for.
fn unpack(segment: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    let damaged = |_| CodecError("lzo data is damaged");
    if out.len() >= SECTOR {
        return lzokay::decompress::decompress(segment, &mut out[..SECTOR]).map_err(damaged);
    }
    // The extent's length can cut the last sector short; the stream does not know.
    let mut whole = [0; SECTOR];
    let n = lzokay::decompress::decompress(segment, &mut whole).map_err(damaged)?.min(out.len());
    out[..n].copy_from_slice(&whole[..n]);
    Ok(n)
}

/// Packs `data` into `out`, framed; false, with something in `out`, when it would become longer
/// than `limit`.
pub(super) fn compress(data: &[u8], limit: usize, out: &mut Vec<u8>, table: &mut Table) -> bool {
    out.clear();
    out.extend([0; LEN]);
    for sector in data.chunks(SECTOR) {
        let left = SECTOR - out.len() % SECTOR;
        if left < LEN {
            out.resize(out.len() + left, 0);
        }
        let head = out.len();
        out.extend([0; LEN]);
        pack(sector, out, table);
        let len = length(out.len() - head - LEN);
        out[head..head + LEN].copy_from_slice(&len);
        if out.len() > limit {
            return false;
        }
    }
    let total = length(out.len());
    out[..LEN].copy_from_slice(&total);
    true
}

fn length(n: usize) -> [u8; LEN] {
    u32::try_from(n).expect("an extent is short").to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compress(data: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        assert!(super::compress(data, usize::MAX, &mut out, &mut Table::default()));
        out
    }

    #[test]
    fn lengths_never_straddle_a_sector() {
        // Lengths are made to end at every distance from a boundary by varying what does not
        // shrink.
        let mut hit = [false; LEN];
        let mut seed = 1u32;
        let mut step = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        let noise: Vec<u8> = (0..SECTOR).map(|_| step()).collect();
        for len in 3900..4096usize {
            let mut data = noise[..len].to_vec();
            data.resize(3 * SECTOR, 7);
            let stream = compress(&data);
            let first = read_len(&stream, LEN).unwrap();
            let left = SECTOR - (2 * LEN + first) % SECTOR;
            if left < LEN {
                hit[left] = true;
            }
            let mut out = vec![1; data.len()];
            assert_eq!(decompress(&stream, &mut out).unwrap(), data.len());
            assert_eq!(out, data);
        }
        assert!(hit.contains(&true), "no stream reached a boundary");
    }

    #[test]
    fn damage_is_an_error() {
        let data: Vec<u8> = (0..3 * SECTOR).map(|i| (i / 3) as u8).collect();
        let stream = compress(&data);
        let mut out = vec![0; data.len()];
        assert!(decompress(&stream[..stream.len() - 1], &mut out).is_err());
        assert!(decompress(&[], &mut out).is_err());
        assert!(decompress(&[5, 0, 0, 0, 1], &mut out).is_err());
        let mut long = stream.clone();
        long[LEN..2 * LEN].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(decompress(&long, &mut out).is_err());
    }
}
