//! The hash that chains records: over the record before, and every field of this one.
//!
//! Fields are written with their length, in a fixed order, so that no two records have the same
//! bytes. The format has a version; a new field is a new version.

use ipc::vault::{AuditKind, AuditRecord};
use sha2::{Digest, Sha256};

pub(super) type Hash = [u8; 32];

/// What stands before the first record.
pub(super) const BEGINNING: Hash = [0; 32];

const FORMAT: &[u8] = b"cleanhands audit 1";

/// The word under which a kind is stored and hashed.
pub(super) fn word(kind: AuditKind) -> &'static str {
    match kind {
        AuditKind::Allowed => "allowed",
        AuditKind::Denied => "denied",
        AuditKind::Outcome => "outcome",
        AuditKind::Note => "note",
    }
}

/// The calls of a record as one text: ids hold no space.
pub(super) fn calls(record: &AuditRecord) -> String {
    record.calls.iter().map(|call| call.as_str()).collect::<Vec<_>>().join(" ")
}

pub(super) fn hash(previous: &Hash, record: &AuditRecord) -> Hash {
    let mut fields = Fields(Sha256::new_with_prefix(FORMAT));
    fields.0.update(previous);
    fields.number(Some(record.seq));
    fields.text(Some(&record.time));
    fields.text(Some(word(record.kind)));
    fields.text(record.request.as_ref().map(|id| id.as_str()));
    fields.text(record.lease.as_ref().map(|id| id.as_str()));
    fields.text(record.session.as_ref().map(|id| id.as_str()));
    fields.text(record.sandbox.as_ref().map(|id| id.as_str()));
    fields.text(Some(&calls(record)));
    fields.text(record.environment.as_deref());
    fields.number(Some(record.generation));
    fields.text(record.entry.as_deref());
    fields.text(record.host.as_deref());
    fields.number(record.port.map(u64::from));
    fields.text(record.address.as_deref());
    fields.text(record.method.as_deref());
    fields.text(record.path.as_deref());
    fields.text(record.rule.as_deref());
    fields.text(record.credential.as_deref());
    fields.text(record.reason.as_deref());
    fields.number(record.status.map(u64::from));
    fields.number(record.bytes_up);
    fields.number(record.bytes_down);
    fields.number(record.duration_ms);
    fields.number(record.scrubbed);
    fields.0.finalize().into()
}

struct Fields(Sha256);

impl Fields {
    fn text(&mut self, text: Option<&str>) {
        match text {
            None => self.0.update([0]),
            Some(text) => {
                self.0.update([1]);
                self.0.update((text.len() as u64).to_le_bytes());
                self.0.update(text);
            }
        }
    }

    fn number(&mut self, number: Option<u64>) {
        match number {
            None => self.0.update([0]),
            Some(number) => {
                self.0.update([2]);
                self.0.update(number.to_le_bytes());
            }
        }
    }
}
