//! A new data key: every row is sealed anew, in one step. Or another key around the data key.
//!
//! Whoever had the former data key (from a memory image, say) cannot read what is stored from then
//! on. The key that wraps it stays. Placeholders stay too: sandboxes hold them. Which key wraps the
//! data key is [`crate::vault::rekey`]'s to say.

use rusqlite::params;
use zeroize::Zeroizing;

use super::{
    Kept, LockedKey, Secret, Store, VaultError, failed, seal, summary, unseal, unseal_row,
};
use crate::vault::key::{KEY_BYTES, Material, derive};
use crate::vault::seal::fill;

/// The place of the placeholders' key, once it no longer follows from the data key.
pub(super) const PLACEHOLDERS: &[&str] = &["placeholder key"];

/// Secret, grant, end, sealed.
type TokenRow = (String, String, u64, Vec<u8>);

impl Store {
    /// Makes a new data key and seals everything under it; says how many rows that were. On disk,
    /// and the former rows wiped, when it returns; after a crash either all is new or nothing.
    pub(in crate::vault) fn rotate(&mut self) -> Result<u64, VaultError> {
        let mut data_key = Zeroizing::new([0u8; KEY_BYTES]);
        fill(&mut *data_key)?;
        let mut rows = LockedKey::new()?;
        derive(&*data_key, &self.id, b"cleanhands vault rows", rows.bytes_mut());
        let wrapped = seal(self.wrapping.bytes(), &self.id, &["data key"], 0, &*data_key)?;
        let (secrets, tokens, authorities) = (self.secrets()?, self.tokens()?, self.keys()?);
        let (old, id) = (&self.rows, &self.id);
        let again = |place: &[&str], version: u64, sealed: &[u8]| {
            let value = unseal_row(old, id, place, version, sealed)?;
            seal(rows.bytes(), id, place, version, value.expose_secret())
        };
        let placeholders =
            seal(rows.bytes(), id, PLACEHOLDERS, 0, self.placeholders.bytes().as_slice())?;
        let write = failed("write");
        let transaction = self.db.transaction().map_err(&write)?;
        for (name, version, sealed) in &secrets {
            let sealed = again(&["secret", name], *version, sealed)?;
            let sql = "UPDATE secret SET sealed = ?3 WHERE name = ?1 AND version = ?2";
            transaction.execute(sql, params![name, version, sealed]).map_err(&write)?;
        }
        for (name, granted, ends, sealed) in &tokens {
            let sealed = again(&["token", name, granted], *ends, sealed)?;
            let sql = "UPDATE token SET sealed = ?3 WHERE name = ?1 AND granted = ?2";
            transaction.execute(sql, params![name, granted, sealed]).map_err(&write)?;
        }
        for (number, place, sealed) in &authorities {
            let sealed = again(&["authority", place], *number, sealed)?;
            let sql = "UPDATE authority SET sealed = ?2 WHERE number = ?1";
            transaction.execute(sql, params![number, sealed]).map_err(&write)?;
        }
        let sql = "INSERT OR REPLACE INTO kept_key VALUES (1, ?1)";
        transaction.execute(sql, [placeholders]).map_err(&write)?;
        transaction.execute("UPDATE vault SET wrapped_key = ?1", [wrapped]).map_err(&write)?;
        transaction.commit().map_err(&write)?;
        let sealed = secrets.len() + tokens.len() + authorities.len();
        self.rows = rows;
        Ok(sealed as u64)
    }

    /// Wraps the data key in another key. On disk, and the former row wiped, when it returns; after
    /// a crash either the new key opens the vault or the former one.
    pub(in crate::vault) fn rewrap(&mut self, material: &Material) -> Result<(), VaultError> {
        let data_key = self.data_key(&self.wrapping)?.ok_or_else(|| {
            VaultError::Failed("a row of the vault was changed from outside: data key".into())
        })?;
        let wrapping = self.wrapping_key(material)?;
        let place: &[&str] = &["data key"];
        let wrapped = seal(wrapping.bytes(), &self.id, place, 0, data_key.expose_secret())?;
        self.db.execute("UPDATE vault SET wrapped_key = ?1", [wrapped]).map_err(failed("write"))?;
        self.wrapping = wrapping;
        Ok(())
    }

    /// Whether this is what opens the vault.
    pub(in crate::vault) fn is_wrapped_by(&self, material: &Material) -> Result<bool, VaultError> {
        Ok(self.data_key(&self.wrapping_key(material)?)?.is_some())
    }

    fn wrapping_key(&self, material: &Material) -> Result<LockedKey, VaultError> {
        let mut wrapping = LockedKey::new()?;
        wrapping.bytes_mut().copy_from_slice(&*material.key(&self.id)?);
        Ok(wrapping)
    }

    fn data_key(&self, wrapping: &LockedKey) -> Result<Option<Secret>, VaultError> {
        let wrapped: Vec<u8> = self
            .db
            .query_row("SELECT wrapped_key FROM vault", [], |row| row.get(0))
            .map_err(failed("read"))?;
        Ok(unseal(wrapping.bytes(), &self.id, &["data key"], 0, &wrapped))
    }

    fn secrets(&self) -> Result<Vec<(String, u64, Vec<u8>)>, VaultError> {
        let read = failed("read");
        let mut statement =
            self.db.prepare("SELECT name, version, sealed FROM secret").map_err(&read)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)));
        rows.and_then(Iterator::collect).map_err(&read)
    }

    fn tokens(&self) -> Result<Vec<TokenRow>, VaultError> {
        let read = failed("read");
        let mut statement =
            self.db.prepare("SELECT name, granted, ends, sealed FROM token").map_err(&read)?;
        let rows =
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)));
        rows.and_then(Iterator::collect).map_err(&read)
    }

    /// Authorities: their number, what lies beside the key, the key.
    fn keys(&self) -> Result<Vec<(u64, String, Vec<u8>)>, VaultError> {
        let read = failed("read");
        let mut statement = self
            .db
            .prepare("SELECT number, not_before, not_after, certificate, sealed FROM authority")
            .map_err(&read)?;
        let rows = statement.query_map([], |row| {
            let key = Secret::new(Vec::new());
            let (not_before, not_after, certificate) = (row.get(1)?, row.get(2)?, row.get(3)?);
            let kept = Kept { certificate, key, not_before, not_after };
            Ok((row.get(0)?, summary(&kept), row.get(4)?))
        });
        rows.and_then(Iterator::collect).map_err(&read)
    }
}
