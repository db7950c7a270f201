//! Packing and unpacking compressed extents.
//!
//! A crate of its own because two readers need it that must not share more: the engine, and the
//! tools that read images which the engine refuses.
//!
//! Hidden here: what the three methods do with a stream that is shorter than its extent (the rest
//! is zero), that has padding behind it (ignored), or that lies. Output never exceeds the buffer
//! given, and a decoder never takes more memory than the format's window of 128 KiB asks for. On
//! the other side ([`Packer`]): what a stream must look like so that Linux reads it, which levels
//! there are, and ([`promising`]) what is not worth an attempt.

mod lzo;
mod lzo_pack;
mod pack;
mod sample;

pub use pack::{Packer, Packing, PackingError};
pub use sample::promising;

use larder_format::items::Compression;
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

/// Why a stream could not be unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CodecError(pub &'static str);

/// Largest window that Linux reads, as a power of two.
const ZSTD_WINDOW_LOG: u32 = 17;

/// Fills `out` with what `input` holds, and with zeros behind it.
///
/// # Errors
/// The stream is damaged, or ends without its end mark before `out` is full.
pub fn decompress(method: Compression, input: &[u8], out: &mut [u8]) -> Result<(), CodecError> {
    let done = match method {
        Compression::None => {
            let n = input.len().min(out.len());
            out[..n].copy_from_slice(&input[..n]);
            n
        }
        Compression::Zlib => zlib(input, out)?,
        Compression::Lzo => lzo::decompress(input, out)?,
        Compression::Zstd => zstd(input, out)?,
    };
    out[done..].fill(0);
    Ok(())
}

fn zlib(input: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    let mut stream = flate2::Decompress::new(true);
    let status = stream
        .decompress(input, out, flate2::FlushDecompress::Finish)
        .map_err(|_| CodecError("zlib stream is damaged"))?;
    let done = usize::try_from(stream.total_out()).expect("no more than the buffer");
    if status != flate2::Status::StreamEnd && done < out.len() {
        return Err(CodecError("zlib stream is cut off"));
    }
    Ok(done)
}

fn zstd(input: &[u8], out: &mut [u8]) -> Result<usize, CodecError> {
    let damaged = |_| CodecError("zstd stream is damaged");
    let mut decoder = Decoder::new().map_err(damaged)?;
    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG)).map_err(damaged)?;
    let len = out.len();
    let mut from = InBuffer::around(input);
    let mut to = OutBuffer::around(out);
    loop {
        let before = (from.pos(), to.pos());
        let hint = decoder.run(&mut from, &mut to).map_err(damaged)?;
        if hint == 0 || to.pos() == len {
            return Ok(to.pos());
        }
        if (from.pos(), to.pos()) == before {
            return Err(CodecError("zstd stream is cut off"));
        }
    }
}

/// Data that shrinks: up to eleven pieces, each repeated.
#[cfg(test)]
fn repeating(longest: usize, most: usize) -> impl proptest::strategy::Strategy<Value = Vec<u8>> {
    use proptest::prelude::*;
    let piece = (prop::collection::vec(any::<u8>(), 1..longest), 1..most);
    prop::collection::vec(piece, 1..12)
        .prop_map(|pieces| pieces.into_iter().flat_map(|(piece, n)| piece.repeat(n)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    const ALL: [Compression; 3] = [Compression::Zlib, Compression::Lzo, Compression::Zstd];

    fn compress(method: Compression, data: &[u8]) -> Vec<u8> {
        let packing = Packing::new(method, None).unwrap();
        Packer::default().pack(packing, data, usize::MAX).unwrap().to_vec()
    }
    fn text(len: usize) -> Vec<u8> {
        (0..len).map(|i| b"larder keeps what it is given "[i % 30] ^ (i / 977) as u8).collect()
    }

    #[test]
    fn streams_unpack_with_padding_short_and_long() {
        for method in ALL {
            for len in [1, 100, 4096, 4097, 131_072] {
                let data = text(len);
                let mut stream = compress(method, &data);
                stream.resize(stream.len().next_multiple_of(4096), 0);
                let mut out = vec![0xee; len];
                decompress(method, &stream, &mut out).unwrap();
                assert_eq!(out, data, "{method:?} {len}");
                // More room than data: zeros. Less: as much as fits.
                let mut out = vec![0xee; len + 5000];
                decompress(method, &stream, &mut out).unwrap();
                assert_eq!(out[..len], data);
                assert!(out[len..].iter().all(|b| *b == 0));
                let mut out = vec![0xee; len.div_ceil(2)];
                decompress(method, &stream, &mut out).unwrap();
                assert_eq!(out, data[..len.div_ceil(2)]);
            }
        }
    }

    #[test]
    fn cut_off_streams_are_errors() {
        for method in ALL {
            let data = text(50_000);
            let stream = compress(method, &data);
            let mut out = vec![0; data.len()];
            assert!(
                decompress(method, &stream[..stream.len() / 2], &mut out).is_err(),
                "{method:?}"
            );
            assert!(decompress(method, &[], &mut out).is_err(), "{method:?}");
        }
    }

    #[test]
    fn a_window_that_linux_would_refuse_is_refused() {
        let mut e = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
        e.window_log(20).unwrap();
        e.write_all(&text(3 << 20)).unwrap();
        let stream = e.finish().unwrap();
        assert!(decompress(Compression::Zstd, &stream, &mut vec![0; 131_072]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            flips in prop::collection::vec((any::<u16>(), any::<u8>()), 1..8),
        ) {
            let mut out = vec![0; 8192];
            for method in ALL {
                let _ = decompress(method, &bytes, &mut out);
                let mut stream = compress(method, &text(8192));
                for (at, value) in &flips {
                    let at = usize::from(*at) % stream.len();
                    stream[at] ^= value;
                }
                let _ = decompress(method, &stream, &mut out);
            }
        }
    }
}
