//! `read`: a text file or a range of its lines; an image or a PDF document as such.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};

use base64::Engine;
use ipc::sandbox::Content;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::files::{Outcome, text};
use super::reach::{Reach, reason};

/// Longest text read whole, or range of lines, in bytes: more would fill the model's context.
const TEXT_BYTES_MAX: u64 = 256 * 1024;
/// Largest image, in base64: what the Messages API takes.
const IMAGE_BASE64_BYTES_MAX: u64 = 5 * 1024 * 1024;
/// Largest PDF document.
const DOCUMENT_BYTES_MAX: u64 = 20 * 1024 * 1024;

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    pub file_path: String,
    /// First and last line, from 1; a last line of 0 or less is the file's last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub view_range: Option<[i64; 2]>,
}

pub fn perform(reach: Reach<'_>, input: &Input) -> Outcome {
    let path = &input.file_path;
    let mut file = open_regular(reach, path, OFlags::RDONLY)?;
    let size = file.metadata().map_err(|e| format!("{path}: {e}"))?.len();
    let mut magic = [0u8; 16];
    let read = file.read(&mut magic).map_err(|e| format!("{path}: {e}"))?;
    file.rewind().map_err(|e| format!("{path}: {e}"))?;
    match media_type(&magic[..read]) {
        Some(media_type @ "application/pdf") => {
            let data = whole(file, path, size, DOCUMENT_BYTES_MAX, "PDF documents")?;
            Ok(Content::Document { media_type: media_type.into(), data: base64(&data) })
        }
        Some(media_type) => {
            let data = whole(file, path, size, IMAGE_BASE64_BYTES_MAX / 4 * 3, "images")?;
            Ok(Content::Image { media_type: media_type.into(), data: base64(&data) })
        }
        None => match input.view_range {
            Some(range) => lines(file, path, range),
            None if size > TEXT_BYTES_MAX => Err(format!(
                "{path}: has {size} bytes, more than {TEXT_BYTES_MAX}: give a view_range"
            )),
            None => {
                let data = whole(file, path, size, TEXT_BYTES_MAX, "texts")?;
                String::from_utf8(data).map(text).map_err(|_| not_text(path))
            }
        },
    }
}

/// Opens a regular file, and nothing else: no device, no FIFO.
pub fn open_regular(reach: Reach<'_>, path: &str, flags: OFlags) -> Result<File, String> {
    let file = File::from(reach.open(path, flags).map_err(|e| e.text(path))?);
    let kind = file.metadata().map_err(|e| format!("{path}: {e}"))?.file_type();
    if kind.is_dir() {
        return Err(format!("{path}: {}", reason(rustix::io::Errno::ISDIR)));
    }
    if !kind.is_file() {
        return Err(format!("{path}: not a regular file"));
    }
    Ok(file)
}

fn media_type(magic: &[u8]) -> Option<&'static str> {
    match magic {
        [0x89, b'P', b'N', b'G', b'\r', b'\n', 0x1a, b'\n', ..] => Some("image/png"),
        [0xff, 0xd8, 0xff, ..] => Some("image/jpeg"),
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Some("image/gif"),
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Some("image/webp"),
        [b'%', b'P', b'D', b'F', b'-', ..] => Some("application/pdf"),
        _ => None,
    }
}

/// The whole file, up to `max` bytes even when it grows meanwhile.
fn whole(file: File, path: &str, size: u64, max: u64, what: &str) -> Result<Vec<u8>, String> {
    let too_large = || format!("{path}: {what} of more than {max} bytes are not read");
    if size > max {
        return Err(too_large());
    }
    let mut data = Vec::new();
    file.take(max + 1).read_to_end(&mut data).map_err(|e| format!("{path}: {e}"))?;
    if data.len() as u64 > max {
        return Err(too_large());
    }
    Ok(data)
}

/// The lines of a range; stops reading at its end or when there is too much of it.
fn lines(file: File, path: &str, [first, last]: [i64; 2]) -> Outcome {
    if first < 1 || (last > 0 && last < first) {
        return Err(format!("{path}: view_range [{first}, {last}] is not a range of lines from 1"));
    }
    let last = if last <= 0 { i64::MAX } else { last };
    let mut reader = BufReader::with_capacity(64 * 1024, file);
    let mut wanted = Vec::new();
    let mut line: i64 = 1;
    let mut at_line_start = true;
    while line <= last {
        let buffer = reader.fill_buf().map_err(|e| format!("{path}: {e}"))?;
        if buffer.is_empty() {
            break;
        }
        let newline = buffer.iter().position(|b| *b == b'\n');
        let used = newline.map_or(buffer.len(), |at| at + 1);
        if line >= first {
            wanted.extend_from_slice(&buffer[..used]);
        }
        reader.consume(used);
        at_line_start = newline.is_some();
        line += i64::from(at_line_start);
        if wanted.len() as u64 > TEXT_BYTES_MAX {
            return Err(format!(
                "{path}: these lines have more than {TEXT_BYTES_MAX} bytes: give a smaller range"
            ));
        }
    }
    let count = if at_line_start { line - 1 } else { line };
    if count < first {
        return Err(format!("{path}: view_range begins at line {first}, the file has {count}"));
    }
    String::from_utf8(wanted).map(text).map_err(|_| not_text(path))
}

fn not_text(path: &str) -> String {
    format!("{path}: is not UTF-8 text")
}

fn base64(data: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(data)
}
