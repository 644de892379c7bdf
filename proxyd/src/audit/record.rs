//! One record as bytes, and the hash that chains it to the one before.
//!
//! A frame is the length of what follows without the hash (4 bytes), the fields in a fixed order,
//! and SHA-256 over the hash before and the fields. Numbers are little-endian; every text carries
//! its length, so that no two records have the same bytes. A new field is a new format.

use ipc::id::CallId;
use ipc::vault::{AuditKind, AuditRecord};
use sha2::{Digest, Sha256};

use super::Line;

pub(super) type Hash = [u8; 32];

pub(super) const HASH_BYTES: usize = 32;
/// What stands before the first record.
pub(super) const BEGINNING: Hash = [0; 32];
/// Longest frame without length and hash: every text at its longest, and room.
const FIELDS_BYTES_MAX: usize = 32 * 1024;
const LENGTH_BYTES: usize = 4;
/// Number, time, kind, generation, which numbers follow.
const FIXED_BYTES: usize = 8 + 8 + 1 + 8 + 1;
const KINDS: [AuditKind; 4] =
    [AuditKind::Allowed, AuditKind::Denied, AuditKind::Outcome, AuditKind::Note];

/// Adds a frame for `line`, its number and hash still zero.
pub(super) fn encode(out: &mut Vec<u8>, kind: AuditKind, line: &Line, milliseconds: i64) {
    let start = out.len();
    out.extend_from_slice(&[0; LENGTH_BYTES + 8]);
    out.extend_from_slice(&milliseconds.to_le_bytes());
    let kind = KINDS.iter().position(|known| *known == kind).unwrap_or_default();
    out.push(u8::try_from(kind).unwrap_or_default());
    out.extend_from_slice(&line.generation.to_le_bytes());
    numbers(out, line);
    text(out, line.request.as_ref().map(|id| id.as_str()), usize::MAX);
    text(out, line.lease.as_ref().map(|id| id.as_str()), usize::MAX);
    text(out, line.session.as_ref().map(|id| id.as_str()), usize::MAX);
    text(out, line.sandbox.as_ref().map(|id| id.as_str()), usize::MAX);
    calls(out, &line.calls);
    text(out, line.environment.as_deref(), 128);
    text(out, line.entry.as_deref(), 32);
    text(out, line.host.as_deref(), 255);
    text(out, line.address.as_deref(), 64);
    text(out, line.method.as_deref(), 64);
    let query = |byte: char| byte == '?' || byte == '#';
    text(out, line.path.as_deref().map(|p| p.split(query).next().unwrap_or("")), 2048);
    text(out, line.rule.as_deref(), 128);
    text(out, line.credential.as_deref(), 128);
    text(out, line.reason.as_deref(), 1024);
    let length = u32::try_from(out.len() - start - LENGTH_BYTES).unwrap_or(u32::MAX);
    out[start..start + LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&BEGINNING);
}

fn numbers(out: &mut Vec<u8>, line: &Line) {
    let list = [
        line.port.map(u64::from),
        line.status.map(u64::from),
        line.bytes_up,
        line.bytes_down,
        line.duration_ms,
        line.scrubbed,
        line.repeated,
    ];
    let mask = list.iter().enumerate().filter(|(_, n)| n.is_some());
    out.push(mask.fold(0, |mask, (at, _)| mask | 1 << at));
    for number in list.into_iter().flatten() {
        out.extend_from_slice(&number.to_le_bytes());
    }
}

/// What a sandbox chose must not fill the disk: longer texts are cut.
fn text(out: &mut Vec<u8>, text: Option<&str>, bytes_max: usize) {
    let Some(text) = text else { return out.extend_from_slice(&[0; 2]) };
    let mut end = text.len();
    let more = if end > bytes_max { "…" } else { "" };
    if end > bytes_max {
        end = (0..=bytes_max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    }
    let length = u16::try_from(1 + end + more.len()).expect("ids and cut texts are short");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..end]);
    out.extend_from_slice(more.as_bytes());
}

/// The calls as one text: ids hold no space.
fn calls(out: &mut Vec<u8>, calls: &[CallId]) {
    let start = out.len();
    out.extend_from_slice(&[0; 2]);
    for (index, call) in calls.iter().enumerate() {
        if index > 0 {
            out.push(b' ');
        }
        out.extend_from_slice(call.as_str().as_bytes());
    }
    let length = u16::try_from(out.len() - start - 1).expect("a lease has few calls");
    out[start..start + 2].copy_from_slice(&length.to_le_bytes());
}

/// A whole frame in a file's bytes.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    pub fields: &'a [u8],
    pub hash: &'a Hash,
    /// Where the next one begins.
    pub end: usize,
}

/// The frame that begins at `at`; none where no whole one does.
pub(super) fn frame(bytes: &[u8], at: usize) -> Option<Frame<'_>> {
    let prefix = bytes.get(at..)?.first_chunk::<LENGTH_BYTES>()?;
    let length = usize::try_from(u32::from_le_bytes(*prefix)).ok()?;
    if !(FIXED_BYTES..=FIELDS_BYTES_MAX).contains(&length) {
        return None;
    }
    let start = at + LENGTH_BYTES;
    let fields = bytes.get(start..start + length)?;
    let hash = bytes.get(start + length..)?.first_chunk::<HASH_BYTES>()?;
    Some(Frame { fields, hash, end: start + length + HASH_BYTES })
}

/// Numbers and chains the frame that begins at `at`; gives its hash and where the next begins.
pub(super) fn seal(bytes: &mut [u8], at: usize, number: u64, before: &Hash) -> (Hash, usize) {
    let start = at + LENGTH_BYTES;
    bytes[start..start + 8].copy_from_slice(&number.to_le_bytes());
    let frame = frame(bytes, at).expect("we have encoded it");
    let (hash, end) = (chained(before, frame.fields), frame.end);
    bytes[end - HASH_BYTES..end].copy_from_slice(&hash);
    (hash, end)
}

pub(super) fn chained(before: &Hash, fields: &[u8]) -> Hash {
    Sha256::new_with_prefix(before).chain_update(fields).finalize().into()
}

/// What a record is found by.
pub(super) struct Keys<'a> {
    pub number: u64,
    pub milliseconds: i64,
    pub kind: Option<AuditKind>,
    pub lease: &'a str,
    pub session: &'a str,
    pub calls: &'a str,
}

/// Reads only what a record is found by.
pub(super) fn keys(fields: &[u8]) -> Option<Keys<'_>> {
    let mut cursor = Cursor(fields);
    let number = cursor.number()?;
    let milliseconds = i64::from_le_bytes(*cursor.take(8)?.first_chunk()?);
    let kind = KINDS.get(usize::from(cursor.take(1)?[0])).copied();
    cursor.take(8)?;
    let mask = cursor.take(1)?[0];
    cursor.take(mask.count_ones() as usize * 8)?;
    cursor.text()?;
    let (lease, session) = (cursor.text()?.unwrap_or(""), cursor.text()?.unwrap_or(""));
    cursor.text()?;
    let calls = cursor.text()?.unwrap_or("");
    Some(Keys { number, milliseconds, kind, lease, session, calls })
}

/// When a record was made, in milliseconds.
pub(super) fn time(fields: &[u8]) -> Option<i64> {
    Some(i64::from_le_bytes(*fields.get(8..)?.first_chunk()?))
}

/// The bytes of the names that a record is found by, from the lease to the calls.
pub(super) fn names(fields: &[u8]) -> Option<&[u8]> {
    let mut cursor = Cursor(fields);
    cursor.take(8 + 8 + 1 + 8)?;
    let mask = cursor.take(1)?[0];
    cursor.take(mask.count_ones() as usize * 8)?;
    cursor.raw_text()?;
    let from = cursor.0;
    for _ in 0..4 {
        cursor.raw_text()?;
    }
    from.get(..from.len() - cursor.0.len())
}

/// The whole record; none when its bytes are no record.
pub(super) fn decode(fields: &[u8], hash: &Hash) -> Option<AuditRecord> {
    let mut cursor = Cursor(fields);
    let seq = cursor.number()?;
    let milliseconds = i64::from_le_bytes(*cursor.take(8)?.first_chunk()?);
    let time = jiff::Timestamp::from_millisecond(milliseconds).ok()?;
    let kind = *KINDS.get(usize::from(cursor.take(1)?[0]))?;
    let generation = cursor.number()?;
    let mask = cursor.take(1)?[0];
    let mut number = |bit: u8| match mask & 1 << bit {
        0 => Some(None),
        _ => cursor.number().map(Some),
    };
    let small = |wide: Option<u64>| wide.map(u16::try_from).transpose().ok();
    let (port, status) = (small(number(0)?)?, small(number(1)?)?);
    let [bytes_up, bytes_down, duration_ms, scrubbed, repeated] =
        [number(2)?, number(3)?, number(4)?, number(5)?, number(6)?];
    let record = AuditRecord {
        seq,
        time: format!("{time:.3}"),
        kind,
        request: cursor.id()?,
        lease: cursor.id()?,
        session: cursor.id()?,
        sandbox: cursor.id()?,
        calls: cursor
            .text()?
            .unwrap_or("")
            .split(' ')
            .filter(|call| !call.is_empty())
            .map(|call| CallId::parse(call).ok())
            .collect::<Option<_>>()?,
        environment: cursor.string()?,
        generation,
        entry: cursor.string()?,
        host: cursor.string()?,
        port,
        address: cursor.string()?,
        method: cursor.string()?,
        path: cursor.string()?,
        rule: cursor.string()?,
        credential: cursor.string()?,
        reason: cursor.string()?,
        status,
        bytes_up,
        bytes_down,
        duration_ms,
        scrubbed,
        repeated,
        hash: hex::encode(hash),
    };
    cursor.0.is_empty().then_some(record)
}

/// The bytes that are still to be read; every read may find too few.
struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn take(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(*self.take(8)?.first_chunk()?))
    }

    fn raw_text(&mut self) -> Option<Option<&'a [u8]>> {
        let length = u16::from_le_bytes(*self.take(2)?.first_chunk()?);
        let Some(length) = length.checked_sub(1) else { return Some(None) };
        self.take(length.into()).map(Some)
    }

    fn text(&mut self) -> Option<Option<&'a str>> {
        match self.raw_text()? {
            None => Some(None),
            Some(text) => std::str::from_utf8(text).ok().map(Some),
        }
    }

    fn string(&mut self) -> Option<Option<String>> {
        Some(self.text()?.map(str::to_owned))
    }

    fn id<T: TryFrom<String>>(&mut self) -> Option<Option<T>> {
        self.string()?.map(|text| T::try_from(text).ok()).map_or(Some(None), |id| id.map(Some))
    }
}
