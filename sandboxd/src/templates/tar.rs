//! Reads tar archives as image layers have them: ustar, with the extensions of POSIX and of GNU.
//!
//! Who made an archive may have meant harm: every length is bounded before anything of it is held,
//! and what is not understood is an error. Nothing here touches a file system.

use std::ffi::OsString;
use std::io::{self, Error, ErrorKind, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

const BLOCK: usize = 512;
/// Longest extended header or long name: paths are at most 4096 bytes, the rest is attributes.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;

/// What an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Directory,
    Symlink,
    HardLink,
    /// A device or a pipe.
    Special,
}

/// One entry's head; the content of a file follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub path: PathBuf,
    pub kind: Kind,
    /// Permission bits as the archive has them.
    pub mode: u32,
    pub bytes: u64,
    /// Seconds since 1970.
    pub modified: i64,
    /// What a link leads to.
    pub link: PathBuf,
}

/// What extensions say of the next entry.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    bytes: Option<u64>,
    modified: Option<i64>,
}

/// An archive that is read from front to end.
pub struct Archive<R> {
    reader: R,
    /// Of the current entry: content that was not read, and what fills its last block.
    left: u64,
    padding: u64,
}

impl<R: Read> Archive<R> {
    pub fn new(reader: R) -> Self {
        Self { reader, left: 0, padding: 0 }
    }

    /// The next entry; none: the archive has ended.
    pub fn next_entry(&mut self) -> io::Result<Option<Entry>> {
        self.skip()?;
        let mut extended = Extended::default();
        loop {
            let Some(header) = self.header()? else { return Ok(None) };
            let bytes = number(&header[124..136])?;
            match header[156] {
                b'x' => read_pax(&self.extension(bytes)?, &mut extended)?,
                // Of all that follow: nothing there is of use here.
                b'g' => drop(self.extension(bytes)?),
                b'L' => extended.path = Some(until_nul(&self.extension(bytes)?).to_vec()),
                b'K' => extended.link = Some(until_nul(&self.extension(bytes)?).to_vec()),
                flag => return self.entry(&header, flag, bytes, extended).map(Some),
            }
        }
    }

    fn entry(
        &mut self,
        header: &[u8; BLOCK],
        flag: u8,
        bytes: u64,
        extended: Extended,
    ) -> io::Result<Entry> {
        let path = extended.path.unwrap_or_else(|| name(header));
        let kind = match flag {
            // A name that ends so was a directory before there was a flag for it.
            0 | b'0' if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' => Kind::File,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' | b'4' | b'6' => Kind::Special,
            b'5' => Kind::Directory,
            other => {
                let kind = char::from(other).escape_default();
                return Err(malformed(format!("an entry is of a kind that is not read: {kind}")));
            }
        };
        let bytes = extended.bytes.unwrap_or(bytes);
        // Only files have content; some writers give links the length of what they lead to.
        let bytes = if kind == Kind::File { bytes } else { 0 };
        self.left = bytes;
        self.padding = padding(bytes);
        let link = extended.link.unwrap_or_else(|| until_nul(&header[157..257]).to_vec());
        Ok(Entry {
            path: OsString::from_vec(path).into(),
            kind,
            mode: u32::try_from(number(&header[100..108])? & 0o7777).unwrap_or(0),
            bytes,
            modified: extended
                .modified
                .unwrap_or_else(|| number(&header[136..148]).map_or(0, u64::cast_signed)),
            link: OsString::from_vec(link).into(),
        })
    }

    /// One header; none at the end, which is a block of zeros or nothing at all.
    fn header(&mut self) -> io::Result<Option<[u8; BLOCK]>> {
        let mut header = [0u8; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            match self.reader.read(&mut header[have..]) {
                Ok(0) if have == 0 => return Ok(None),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => have += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if header.iter().all(|byte| *byte == 0) {
            // What comes after the end counts for the digest only.
            io::copy(&mut self.reader, &mut io::sink())?;
            return Ok(None);
        }
        let sum = |byte: (usize, &u8)| match byte.0 {
            148..156 => u64::from(b' '),
            _ => u64::from(*byte.1),
        };
        let counted: u64 = header.iter().enumerate().map(sum).sum();
        if number(&header[148..156])? != counted {
            return Err(malformed("a header's checksum is wrong".to_owned()));
        }
        Ok(Some(header))
    }

    fn extension(&mut self, bytes: u64) -> io::Result<Vec<u8>> {
        if bytes > EXTENSION_BYTES_MAX {
            return Err(malformed(format!("an extended header has {bytes} bytes")));
        }
        (self.left, self.padding) = (bytes, padding(bytes));
        let mut text = Vec::new();
        self.read_to_end(&mut text)?;
        self.skip()?;
        Ok(text)
    }

    fn skip(&mut self) -> io::Result<()> {
        let bytes = self.left + self.padding;
        (self.left, self.padding) = (0, 0);
        let skipped = io::copy(&mut (&mut self.reader).take(bytes), &mut io::sink())?;
        if skipped == bytes { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }
}

/// The content of the current entry.
impl<R: Read> Read for Archive<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let read = self.reader.read(&mut buffer[..most])?;
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.left -= read as u64;
        Ok(read)
    }
}

fn malformed(text: String) -> Error {
    Error::new(ErrorKind::InvalidData, format!("not a tar archive: {text}"))
}

fn padding(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK as u64) - bytes
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or(field)
}

/// The name of a header: with the prefix that ustar has and GNU's format uses for other things.
fn name(header: &[u8; BLOCK]) -> Vec<u8> {
    let own = until_nul(&header[..100]);
    let prefix = until_nul(&header[345..500]);
    if &header[257..263] != b"ustar\0" || prefix.is_empty() {
        return own.to_vec();
    }
    [prefix, b"/", own].concat()
}

/// Octal digits, or where the highest bit is set, the number itself (GNU).
fn number(field: &[u8]) -> io::Result<u64> {
    let fail = || malformed("a number is not readable".to_owned());
    if field[0] & 0x80 != 0 {
        // Negative numbers are times before 1970, and nothing else that would be legal.
        if field[0] != 0x80 {
            return Ok(0);
        }
        let fold =
            |sum: Option<u64>, byte: &u8| sum?.checked_mul(256).map(|sum| sum | u64::from(*byte));
        return field[1..].iter().fold(Some(0), fold).ok_or_else(fail);
    }
    let text = std::str::from_utf8(until_nul(field)).map_err(|_| fail())?.trim();
    if text.is_empty() { Ok(0) } else { u64::from_str_radix(text, 8).map_err(|_| fail()) }
}

/// The records of an extended header (pax(1)): `LENGTH KEY=VALUE\n`.
fn read_pax(text: &[u8], into: &mut Extended) -> io::Result<()> {
    let fail = || malformed("an extended header is not readable".to_owned());
    let mut rest = text;
    while !rest.is_empty() {
        let blank = rest.iter().position(|byte| *byte == b' ').ok_or_else(fail)?;
        let length = std::str::from_utf8(&rest[..blank]).ok().and_then(|t| t.parse().ok());
        let length: usize = length.ok_or_else(fail)?;
        let (record, after) = rest.split_at_checked(length).ok_or_else(fail)?;
        rest = after;
        let record = record.get(blank + 1..).and_then(|r| r.strip_suffix(b"\n"));
        let record = record.ok_or_else(fail)?;
        let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(fail)?;
        let (key, value) = (&record[..equals], &record[equals + 1..]);
        let text = || std::str::from_utf8(value).map_err(|_| fail());
        match key {
            b"path" => into.path = Some(value.to_vec()),
            b"linkpath" => into.link = Some(value.to_vec()),
            b"size" => into.bytes = Some(text()?.parse().map_err(|_| fail())?),
            b"mtime" => {
                let whole = text()?.split('.').next().unwrap_or("0");
                into.modified = Some(whole.parse().map_err(|_| fail())?);
            }
            _ if key.starts_with(b"GNU.sparse") => {
                return Err(malformed("a file with holes is not read".to_owned()));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header as ustar has it.
    fn header(name: &str, flag: u8, bytes: usize, link: &str) -> Vec<u8> {
        let mut header = vec![0u8; BLOCK];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[100..108].copy_from_slice(b"0000755\0");
        header[124..136].copy_from_slice(format!("{bytes:011o}\0").as_bytes());
        header[136..148].copy_from_slice(b"00000000012\0");
        header[156] = flag;
        header[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header[257..265].copy_from_slice(b"ustar\x0000");
        header[148..156].copy_from_slice(b"        ");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        header
    }

    fn with_content(mut header: Vec<u8>, content: &[u8]) -> Vec<u8> {
        header.extend_from_slice(content);
        header.resize(header.len().next_multiple_of(BLOCK), 0);
        header
    }

    #[test]
    fn entries_come_in_order_with_their_content_and_their_long_names() {
        let long = "d/".repeat(150) + "f";
        let record = format!(" path={long}\n");
        let length = record.len() + 3;
        let pax = format!("{length}{record}");
        let bytes = [
            with_content(header("a", b'0', 3, ""), b"one"),
            with_content(header("x", b'x', pax.len(), ""), pax.as_bytes()),
            with_content(header("short", b'0', 1, ""), b"2"),
            header("l", b'2', 0, "a"),
            header("dir/", b'5', 0, ""),
            vec![0; 2 * BLOCK],
        ]
        .concat();
        let mut archive = Archive::new(&bytes[..]);

        let first = archive.next_entry().unwrap().unwrap();
        let mut content = String::new();
        archive.read_to_string(&mut content).unwrap();
        let second = archive.next_entry().unwrap().unwrap();
        let link = archive.next_entry().unwrap().unwrap();
        let directory = archive.next_entry().unwrap().unwrap();

        assert_eq!((first.path.to_str(), first.mode, first.modified), (Some("a"), 0o755, 10));
        assert_eq!(content, "one");
        assert_eq!(second.path.to_str(), Some(&*long));
        assert_eq!((link.kind, link.link.to_str()), (Kind::Symlink, Some("a")));
        assert_eq!(directory.kind, Kind::Directory);
        assert_eq!(archive.next_entry().unwrap(), None);
    }

    #[test]
    fn what_is_cut_changed_or_not_understood_is_an_error() {
        let whole = with_content(header("a", b'0', 600, ""), &[7; 600]);
        let mut changed = whole.clone();
        changed[0] = b'b';
        let huge = header("x", b'x', usize::try_from(2 * EXTENSION_BYTES_MAX).unwrap(), "");
        let pax = with_content(header("x", b'x', 7, ""), b"99 a=b\n");
        for bytes in
            [&whole[..700], &whole[..100], &changed, &huge, &pax, &header("a", b'S', 0, "")]
        {
            let mut archive = Archive::new(bytes);
            let outcome = archive.next_entry().and_then(|_| archive.next_entry());

            assert!(outcome.is_err(), "{outcome:?}");
        }
    }
}
