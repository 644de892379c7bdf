//! Searches a compressed body by decoding it in step; lets it go on as it came, or not at all.
//!
//! Encoded bytes are held until everything they decode to is known and clear. gzip, deflate and
//! brotli decoders give out all that their input determines; zstd decodes whole blocks, so there
//! bytes wait for the end of their block (RFC 8878: at most 128 KiB). The encoded bytes are
//! searched too, for what is beside the data.

use std::io::{Error, Write};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::write::{MultiGzDecoder, ZlibDecoder};
use zeroize::Zeroizing;
use zstd::stream::raw::{DParameter, Decoder, Operation};

use super::automaton::Automaton;
use super::{ScrubError, lens};

/// A body may decode to this much, whatever its size.
const DECODED_BYTES_FREE: u64 = 16 << 20;
/// And beyond that to this many times its own size: twice what deflate can reach, far below what
/// it takes to keep a processor busy with a few bytes.
const DECODED_RATIO_MAX: u64 = 2048;
/// Room for decoded bytes between two steps of the search.
const STEP_BYTES: usize = 16 << 10;
/// Largest window a zstd body may ask for, as a power of two: 8 MiB (RFC 9659).
const ZSTD_WINDOW_LOG_MAX: u32 = 23;
/// What zstd asks for next when it has no part of a block's content: a block's header.
const ZSTD_BLOCK_HEADER_BYTES: usize = 3;

/// One compressed body.
pub(super) struct Encoded {
    name: &'static str,
    codec: Codec,
    /// Goes over the encoded bytes themselves: names, comments and frames to be skipped are no
    /// part of what they decode to.
    outside: lens::Search,
    /// Encoded bytes that are not yet known to be clear.
    held: Vec<Bytes>,
    encoded_bytes: u64,
}

enum Codec {
    Gzip(Box<MultiGzDecoder<Search>>),
    Deflate(Box<ZlibDecoder<Search>>),
    Brotli(Box<brotli::DecompressorWriter<Search>>),
    Zstd(Box<Zstd>),
}

struct Zstd {
    decoder: Decoder<'static>,
    search: Search,
    out: Zeroizing<Vec<u8>>,
    /// How much input zstd would like next: what it says about where in a frame it is.
    wanted: usize,
}

/// Takes decoded bytes, keeps none.
struct Search {
    search: lens::Search,
    found: bool,
    decoded_bytes: u64,
    decoded_bytes_max: u64,
}

impl Encoded {
    /// For the content coding of that name; none when it cannot be decoded here.
    pub(super) fn new(coding: &[u8], automaton: Arc<Automaton>) -> Option<Self> {
        let search = Search {
            search: lens::Search::new(automaton.clone()),
            found: false,
            decoded_bytes: 0,
            decoded_bytes_max: DECODED_BYTES_FREE,
        };
        let (name, codec) = match coding {
            b"gzip" | b"x-gzip" => ("gzip", Codec::Gzip(Box::new(MultiGzDecoder::new(search)))),
            b"deflate" => ("deflate", Codec::Deflate(Box::new(ZlibDecoder::new(search)))),
            b"br" => {
                let decoder = brotli::DecompressorWriter::new(search, STEP_BYTES);
                ("br", Codec::Brotli(Box::new(decoder)))
            }
            b"zstd" => ("zstd", Codec::Zstd(Box::new(Zstd::new(search)?))),
            _ => return None,
        };
        let outside = lens::Search::new(automaton);
        Some(Self { name, codec, outside, held: Vec::new(), encoded_bytes: 0 })
    }

    pub(super) fn push(&mut self, chunk: Bytes) -> Result<Vec<Bytes>, ScrubError> {
        if chunk.is_empty() {
            return Ok(Vec::new());
        }
        if !self.outside.push(&chunk).is_empty() {
            return Err(ScrubError::Found(self.name));
        }
        self.encoded_bytes += chunk.len() as u64;
        let allowed = self.encoded_bytes.saturating_mul(DECODED_RATIO_MAX);
        self.search().decoded_bytes_max = allowed.saturating_add(DECODED_BYTES_FREE);
        let outcome = match &mut self.codec {
            Codec::Gzip(decoder) => decode(decoder, &chunk),
            Codec::Deflate(decoder) => decode(decoder, &chunk),
            Codec::Brotli(decoder) => decode(decoder, &chunk),
            Codec::Zstd(zstd) => zstd.decode(&chunk),
        };
        let name = self.name;
        let search = self.search();
        if search.found {
            return Err(ScrubError::Found(name));
        }
        if search.decoded_bytes > search.decoded_bytes_max {
            return Err(ScrubError::Bomb(name));
        }
        outcome.map_err(|_| ScrubError::Decode(name))?;
        self.held.push(chunk);
        match self.is_clear() {
            true => Ok(std::mem::take(&mut self.held)),
            false => Ok(Vec::new()),
        }
    }

    /// After which silence what is held may go, if it is little enough once decoded.
    pub(super) fn pause(&self) -> Option<Duration> {
        let (whole, search) = match &self.codec {
            Codec::Gzip(decoder) => (true, decoder.get_ref()),
            Codec::Deflate(decoder) => (true, decoder.get_ref()),
            Codec::Brotli(decoder) => (true, decoder.get_ref()),
            Codec::Zstd(zstd) => (zstd.at_block_end(), &zstd.search),
        };
        let live = search.search.live().max(self.outside.live());
        if self.held.is_empty() || !whole { None } else { super::pause(live) }
    }

    /// Lets go what is held although a value may still follow; its end would stop the stream.
    pub(super) fn let_go(&mut self) -> Vec<Bytes> {
        if self.pause().is_some() { std::mem::take(&mut self.held) } else { Vec::new() }
    }

    /// The body has ended. A match that is still open is no value; a block that is not complete
    /// was not searched.
    pub(super) fn finish(self) -> Result<Vec<Bytes>, ScrubError> {
        match &self.codec {
            Codec::Zstd(zstd) if !zstd.at_block_end() && self.encoded_bytes > 0 => {
                Err(ScrubError::Decode(self.name))
            }
            _ => Ok(self.held),
        }
    }

    fn search(&mut self) -> &mut Search {
        match &mut self.codec {
            Codec::Gzip(decoder) => decoder.get_mut(),
            Codec::Deflate(decoder) => decoder.get_mut(),
            Codec::Brotli(decoder) => decoder.get_mut(),
            Codec::Zstd(zstd) => &mut zstd.search,
        }
    }

    fn is_clear(&mut self) -> bool {
        let whole = match &self.codec {
            Codec::Zstd(zstd) => zstd.at_block_end(),
            _ => true,
        };
        whole && self.outside.live() == 0 && self.search().search.live() == 0
    }
}

fn decode(decoder: &mut impl Write, chunk: &[u8]) -> Result<(), Error> {
    decoder.write_all(chunk)?;
    // Decoders keep some output back until they are asked.
    decoder.flush()
}

impl Zstd {
    fn new(search: Search) -> Option<Self> {
        let mut decoder = Decoder::new().ok()?;
        decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX)).ok()?;
        Some(Self { decoder, search, out: Zeroizing::new(vec![0; STEP_BYTES]), wanted: 0 })
    }

    fn decode(&mut self, mut chunk: &[u8]) -> Result<(), Error> {
        loop {
            let status = self.decoder.run_on_buffers(chunk, &mut self.out)?;
            self.wanted = status.remaining;
            chunk = &chunk[status.bytes_read..];
            self.search.write_all(&self.out[..status.bytes_written])?;
            let full = status.bytes_written == self.out.len();
            if chunk.is_empty() && !full {
                return Ok(());
            }
            if status.bytes_read == 0 && status.bytes_written == 0 {
                return Err(Error::other("no progress"));
            }
        }
    }

    fn at_block_end(&self) -> bool {
        self.wanted <= ZSTD_BLOCK_HEADER_BYTES
    }
}

impl Write for Search {
    fn write(&mut self, decoded: &[u8]) -> std::io::Result<usize> {
        self.decoded_bytes += decoded.len() as u64;
        if self.decoded_bytes > self.decoded_bytes_max {
            return Err(Error::other("expands too far"));
        }
        if !self.search.push(decoded).is_empty() {
            self.found = true;
            return Err(Error::other("holds a value"));
        }
        Ok(decoded.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scrub::{BodyScrubber, Patterns, forms};

    const CANARY: &str = "SECRET-CANARY-7f3a9b";
    const CODINGS: [&str; 4] = ["gzip", "deflate", "br", "zstd"];

    fn scrubber(coding: &str) -> BodyScrubber {
        let patterns = Patterns::new(&forms(CANARY.as_bytes()));
        BodyScrubber::new(&patterns, Some(coding.as_bytes())).unwrap()
    }

    fn compress(coding: &str, text: &[u8]) -> Vec<u8> {
        use flate2::Compression;
        match coding {
            "gzip" => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
            "deflate" => {
                let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(text).unwrap();
                encoder.finish().unwrap()
            }
            "br" => {
                let mut out = Vec::new();
                let mut writer = brotli::CompressorWriter::new(&mut out, 4096, 5, 20);
                writer.write_all(text).unwrap();
                drop(writer);
                out
            }
            _ => zstd::encode_all(text, 3).unwrap(),
        }
    }

    /// Pushes in chunks; what got out, and how it ended.
    fn through(coding: &str, body: &[u8], size: usize) -> (Vec<u8>, Result<(), ScrubError>) {
        let mut scrubber = scrubber(coding);
        let mut out = Vec::new();
        for piece in body.chunks(size) {
            match scrubber.push(Bytes::copy_from_slice(piece)) {
                Ok(parts) => parts.iter().for_each(|part| out.extend_from_slice(part)),
                Err(error) => return (out, Err(error)),
            }
        }
        let ended = scrubber.finish().map(|rest| {
            rest.iter().for_each(|part| out.extend_from_slice(part));
        });
        (out, ended)
    }

    fn ordinary_text() -> Vec<u8> {
        (0..6000)
            .map(|i| format!("line {i} SECRET-CANDLE {}\n", i * 7919))
            .collect::<String>()
            .into()
    }

    #[test]
    fn clear_bodies_go_on_byte_for_byte() {
        for coding in CODINGS {
            let body = compress(coding, &ordinary_text());
            for size in [1, 7, 1000, 65536] {
                let (out, ended) = through(coding, &body, size);
                assert_eq!(ended, Ok(()), "{coding} in chunks of {size}");
                assert!(out == body, "{coding} in chunks of {size}");
            }
        }
    }

    #[test]
    fn a_value_in_a_compressed_body_ends_it_and_never_gets_out_whole() {
        for coding in CODINGS {
            for before in [0, 3, 5000, 200_000] {
                let mut text = ordinary_text().repeat(2);
                text.truncate(before);
                text.extend_from_slice(CANARY.as_bytes());
                text.extend_from_slice(b" and more");
                let body = compress(coding, &text);
                for size in [1, 13, body.len()] {
                    let (out, ended) = through(coding, &body, size);
                    assert_eq!(ended, Err(ScrubError::Found(named(coding))), "{coding} {before}");
                    assert!(out.len() < body.len());
                    assert!(!decoded(coding, &out).windows(4).any(|w| w == b"ARY-"), "{coding}");
                }
            }
        }
    }

    fn named(coding: &str) -> &'static str {
        CODINGS.into_iter().find(|name| *name == coding).unwrap()
    }

    /// As much as a lenient reader gets out of a cut body.
    fn decoded(coding: &str, body: &[u8]) -> Vec<u8> {
        use std::io::Read;
        let mut reader: Box<dyn Read> = match coding {
            "gzip" => Box::new(flate2::read::GzDecoder::new(body)),
            "deflate" => Box::new(flate2::read::ZlibDecoder::new(body)),
            "br" => Box::new(brotli::Decompressor::new(body, 4096)),
            _ => Box::new(zstd::stream::read::Decoder::new(body).unwrap()),
        };
        let mut out = Vec::new();
        let mut byte = [0];
        while matches!(reader.read(&mut byte), Ok(1)) {
            out.push(byte[0]);
        }
        out
    }

    #[test]
    fn each_flushed_event_goes_on_at_once() {
        let patterns = Patterns::new(&forms(CANARY.as_bytes()));
        let mut scrubber = BodyScrubber::new(&patterns, Some(b"gzip")).unwrap();
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        for event in 0..5 {
            write!(encoder, "data: event {event}\n\n").unwrap();
            encoder.flush().unwrap();
            let sent = std::mem::take(encoder.get_mut());

            let out = scrubber.push(Bytes::from(sent.clone())).unwrap();

            assert_eq!(out.concat(), sent, "event {event} waited");
        }
    }

    #[test]
    fn zstd_blocks_that_are_not_yet_whole_wait() {
        // Random bytes are stored raw in the block, so a reader of the wire would see them.
        let mut raw = vec![0u8; 500];
        getrandom::fill(&mut raw).unwrap();
        let body = compress("zstd", &[&raw[..], CANARY.as_bytes(), &raw[..]].concat());
        let at = body.windows(CANARY.len()).position(|w| w == CANARY.as_bytes()).unwrap();
        let mut scrubber = scrubber("zstd");

        let first = scrubber.push(Bytes::copy_from_slice(&body[..at + 4])).unwrap();
        let second = scrubber.push(Bytes::copy_from_slice(&body[at + 4..]));

        assert!(first.is_empty());
        assert_eq!(second, Err(ScrubError::Found("zstd")));
    }

    #[test]
    fn a_value_beside_the_data_ends_the_body_and_does_not_get_out() {
        let named_gzip = |field: fn(flate2::GzBuilder, &str) -> flate2::GzBuilder| {
            let builder = field(flate2::GzBuilder::new(), CANARY);
            let mut encoder = builder.write(Vec::new(), flate2::Compression::fast());
            encoder.write_all(b"nothing").unwrap();
            encoder.finish().unwrap()
        };
        let length = u32::try_from(CANARY.len()).unwrap();
        let skippable = [&[0x50, 0x2a, 0x4d, 0x18][..], &length.to_le_bytes(), CANARY.as_bytes()];
        let zstd = [skippable.concat(), compress("zstd", b"nothing")].concat();
        // WBITS 16; a metablock without data, with one byte of length; then the last, empty one.
        let size = u8::try_from(CANARY.len() - 1).unwrap();
        let brotli = [&[0b0010_1100, size << 2, size >> 6][..], CANARY.as_bytes(), &[3]].concat();
        for (coding, body) in [
            ("gzip", named_gzip(|gzip, name| gzip.filename(name))),
            ("gzip", named_gzip(|gzip, name| gzip.comment(name))),
            ("gzip", named_gzip(|gzip, name| gzip.extra(name))),
            ("gzip", CANARY.as_bytes()[..9].to_vec()),
            ("zstd", zstd),
            ("br", brotli),
        ] {
            let needle = &CANARY.as_bytes()[..9];
            let patterns =
                Patterns::new(&forms(if body.len() < 10 { needle } else { CANARY.as_bytes() }));
            for size in [1, 5, body.len()] {
                let mut scrubber = BodyScrubber::new(&patterns, Some(coding.as_bytes())).unwrap();
                let mut out = Vec::new();
                let mut ended = Ok(());
                for piece in body.chunks(size) {
                    match scrubber.push(Bytes::copy_from_slice(piece)) {
                        Ok(parts) => out.extend(parts.concat()),
                        Err(error) => {
                            ended = Err(error);
                            break;
                        }
                    }
                }
                assert_eq!(ended, Err(ScrubError::Found(named(coding))), "{coding} by {size}");
                assert!(!out.windows(4).any(|w| CANARY.as_bytes().starts_with(w)), "{coding}");
            }
        }
    }

    #[test]
    fn broken_bodies_and_bombs_are_refused() {
        for coding in CODINGS {
            let (_, ended) = through(coding, b"this is not compressed at all", 8);
            assert_eq!(ended, Err(ScrubError::Decode(named(coding))), "{coding}");
        }
        let bomb = compress("br", &vec![0; 80 << 20]);
        let (_, ended) = through("br", &bomb, 16 << 10);
        assert_eq!(ended, Err(ScrubError::Bomb("br")));
    }

    #[test]
    fn an_empty_body_ends_well() {
        for coding in CODINGS {
            assert_eq!(through(coding, b"", 1), (Vec::new(), Ok(())), "{coding}");
        }
    }
}
