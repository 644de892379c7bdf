//! The embedded vault: one SQLite file with one sealed row for each version of a secret.
//!
//! A value is sealed by itself with XChaCha20-Poly1305 under a random nonce; what it belongs to
//! (vault, table, name, version) is authenticated with it, so rows cannot change places. The data
//! key lies wrapped under the key of [`super::key`]. The last two versions are kept, so that an
//! exchange in flight still finds the one it used.

mod rotate;

use std::path::Path;

use hmac::{Hmac, KeyInit, Mac};
use ipc::vault::{SECRET_BYTES_MAX, SECRET_BYTES_MIN, SecretInfo};
use rusqlite::{Connection, OptionalExtension, params};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use super::VaultError;
use super::key::{KEY_BYTES, Material, derive};
use super::seal::{fill, seal, unseal};
use super::secret::Secret;
use crate::sys::keys::LockedKey;
use crate::tls::ca::Kept;

/// Versions kept of each secret: the current one and the one before.
const VERSIONS_KEPT: u64 = 2;
/// How often the last use of a secret is written down: more often would cost a disk write for
/// each request.
const LAST_USE_SECONDS: i64 = 60;
const FORMAT: u32 = 1;

const SCHEMA: &str = "
CREATE TABLE vault (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    format INTEGER NOT NULL,
    id BLOB NOT NULL,
    wrapped_key BLOB NOT NULL
);
CREATE TABLE secret (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    sealed BLOB NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID;
CREATE TABLE used (name TEXT PRIMARY KEY, at INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE numbered (name TEXT PRIMARY KEY, last INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE authority (
    number INTEGER PRIMARY KEY,
    not_before INTEGER NOT NULL,
    not_after INTEGER NOT NULL,
    certificate BLOB NOT NULL,
    sealed BLOB NOT NULL
);
";

/// What came with tokens: made also in a vault of before.
const TOKENS: &str = "
CREATE TABLE IF NOT EXISTS login (
    name TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    reason TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS token (
    name TEXT NOT NULL,
    granted TEXT NOT NULL,
    ends INTEGER NOT NULL,
    sealed BLOB NOT NULL,
    PRIMARY KEY (name, granted)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS kept_key (one INTEGER PRIMARY KEY CHECK (one = 1), sealed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS leased (id TEXT PRIMARY KEY, ends INTEGER NOT NULL) WITHOUT ROWID;
";

/// The open vault.
pub(super) struct Store {
    db: Connection,
    id: Vec<u8>,
    /// Wraps the data key.
    wrapping: LockedKey,
    rows: LockedKey,
    placeholders: LockedKey,
}

fn failed(what: &str) -> impl Fn(rusqlite::Error) -> VaultError + '_ {
    move |error| VaultError::Failed(format!("cannot {what} the vault: {error}"))
}

/// Whether a vault is there already.
pub(super) fn exists(directory: &Path) -> bool {
    directory.join("vault.sqlite").exists()
}

impl Store {
    /// Opens the vault in `directory`, or makes one.
    pub(super) fn open(directory: &Path, material: &Material) -> Result<Self, VaultError> {
        let mut db = Connection::open(directory.join("vault.sqlite")).map_err(failed("open"))?;
        // An exclusive journal stays after each write, with what was overwritten: emptied by its
        // limit.
        db.execute_batch(
            "PRAGMA locking_mode = EXCLUSIVE;
             PRAGMA journal_mode = DELETE;
             PRAGMA journal_size_limit = 0;
             PRAGMA synchronous = FULL;
             PRAGMA secure_delete = ON;
             PRAGMA temp_store = MEMORY;
             PRAGMA trusted_schema = OFF;",
        )
        .map_err(failed("open"))?;
        let head = |db: &Connection| {
            db.query_row("SELECT format, id, wrapped_key FROM vault", [], |row| {
                Ok((row.get::<_, u32>(0)?, row.get::<_, Vec<u8>>(1)?, row.get::<_, Vec<u8>>(2)?))
            })
            .optional()
        };
        let made = db.table_exists(None, "vault").map_err(failed("read"))?;
        if !made {
            create(&mut db, material)?;
        }
        db.execute_batch(TOKENS).map_err(failed("make"))?;
        let (format, id, wrapped) = head(&db)
            .map_err(failed("read"))?
            .ok_or_else(|| VaultError::Failed("the vault has no head row".into()))?;
        if format != FORMAT {
            return Err(VaultError::Failed(format!(
                "the vault has format {format}, this program reads {FORMAT}"
            )));
        }
        let mut wrapping = LockedKey::new()?;
        wrapping.bytes_mut().copy_from_slice(&*material.key(&id)?);
        let data_key =
            unseal(wrapping.bytes(), &id, &["data key"], 0, &wrapped).ok_or_else(|| {
                VaultError::Key(
                    "cannot open the vault: the configured key is not the one it was made with; \
                     where it replaces another one, name that as former-key in proxyd.toml"
                        .into(),
                )
            })?;
        let (mut rows, mut placeholders) = (LockedKey::new()?, LockedKey::new()?);
        derive(data_key.expose_secret(), &id, b"cleanhands vault rows", rows.bytes_mut());
        let purpose = b"cleanhands vault placeholders";
        derive(data_key.expose_secret(), &id, purpose, placeholders.bytes_mut());
        let mut store = Self { db, id, wrapping, rows, placeholders };
        store.restore_placeholders()?;
        Ok(store)
    }

    /// Once the data key has been replaced, the placeholders' key lies beside it.
    fn restore_placeholders(&mut self) -> Result<(), VaultError> {
        let kept = self
            .db
            .query_row("SELECT sealed FROM kept_key", [], |row| row.get::<_, Vec<u8>>(0))
            .optional()
            .map_err(failed("read"))?;
        let Some(sealed) = kept else { return Ok(()) };
        let key = self.unseal(rotate::PLACEHOLDERS, 0, &sealed)?;
        let key: &[u8; KEY_BYTES] = key.expose_secret().try_into().map_err(|_| {
            VaultError::Failed("the vault's key of placeholders has another length".into())
        })?;
        self.placeholders.bytes_mut().copy_from_slice(key);
        Ok(())
    }

    /// Stores a value as the next version of `name`; on disk when it returns.
    pub(super) fn put(
        &mut self,
        name: &str,
        value: &Secret,
        now: i64,
    ) -> Result<SecretInfo, VaultError> {
        check_name(name)?;
        check_value(value.expose_secret())?;
        let write = failed("write");
        let transaction = self.db.transaction().map_err(&write)?;
        // A removed name goes on counting: a version never stands for two values.
        let version: u64 = transaction
            .query_row(
                "INSERT INTO numbered VALUES (?1, 1)
                 ON CONFLICT (name) DO UPDATE SET last = last + 1 RETURNING last",
                [name],
                |row| row.get(0),
            )
            .map_err(&write)?;
        let sealed =
            seal(self.rows.bytes(), &self.id, &["secret", name], version, value.expose_secret())?;
        transaction
            .execute(
                "INSERT INTO secret VALUES (?1, ?2, ?3, ?4)",
                params![name, version, now, sealed],
            )
            .map_err(&write)?;
        transaction
            .execute(
                "DELETE FROM secret WHERE name = ?1 AND version + ?3 <= ?2",
                params![name, version, VERSIONS_KEPT],
            )
            .map_err(&write)?;
        // What was had for the former value is no longer wanted.
        for table in ["login", "token"] {
            let sql = format!("DELETE FROM {table} WHERE name = ?1");
            transaction.execute(&sql, [name]).map_err(&write)?;
        }
        transaction.commit().map_err(&write)?;
        self.list()?
            .into_iter()
            .find(|secret| secret.name == name)
            .ok_or_else(|| VaultError::Failed("the vault lost a row it has just written".into()))
    }

    /// Every secret's name and dates, by name.
    pub(super) fn list(&self) -> Result<Vec<SecretInfo>, VaultError> {
        let read = failed("read");
        let mut statement = self
            .db
            .prepare_cached(
                "SELECT name, max(version), created_at,
                        (SELECT at FROM used WHERE used.name = secret.name),
                        (SELECT version FROM login WHERE login.name = secret.name),
                        (SELECT max(ends) FROM token WHERE token.name = secret.name)
                 FROM secret GROUP BY name ORDER BY name",
            )
            .map_err(&read)?;
        let rows = statement
            .query_map([], |row| {
                let version: u64 = row.get(1)?;
                let refused = row.get::<_, Option<u64>>(4)? == Some(version);
                Ok(SecretInfo {
                    name: row.get(0)?,
                    kept: "vault".into(),
                    version,
                    created_at: rfc3339(row.get(2)?),
                    last_used_at: row.get::<_, Option<i64>>(3)?.map(rfc3339),
                    expires_at: row.get::<_, Option<i64>>(5)?.map(rfc3339),
                    state: if refused { "needs_login" } else { "ready" }.into(),
                })
            })
            .map_err(&read)?;
        rows.collect::<Result<_, _>>().map_err(&read)
    }

    /// Removes every version of a secret.
    pub(super) fn remove(&mut self, name: &str) -> Result<(), VaultError> {
        let write = failed("write");
        let transaction = self.db.transaction().map_err(&write)?;
        let removed =
            transaction.execute("DELETE FROM secret WHERE name = ?1", [name]).map_err(&write)?;
        for table in ["used", "login", "token"] {
            let sql = format!("DELETE FROM {table} WHERE name = ?1");
            transaction.execute(&sql, [name]).map_err(&write)?;
        }
        transaction.commit().map_err(&write)?;
        match removed {
            0 => Err(VaultError::Missing(name.to_owned())),
            _ => Ok(()),
        }
    }

    /// The kept versions of a secret, the current one first.
    pub(super) fn values(&self, name: &str) -> Result<Vec<Secret>, VaultError> {
        let read = failed("read");
        let mut statement = self
            .db
            .prepare_cached(
                "SELECT version, sealed FROM secret WHERE name = ?1 ORDER BY version DESC",
            )
            .map_err(&read)?;
        let rows = statement
            .query_map([name], |row| Ok((row.get::<_, u64>(0)?, row.get::<_, Vec<u8>>(1)?)))
            .map_err(&read)?;
        let mut values = Vec::new();
        for row in rows {
            let (version, sealed) = row.map_err(&read)?;
            values.push(self.unseal(&["secret", name], version, &sealed)?);
        }
        match values.is_empty() {
            true => Err(VaultError::Missing(name.to_owned())),
            false => Ok(values),
        }
    }

    /// The current version of a secret and its number.
    pub(super) fn current(&self, name: &str) -> Result<(u64, Secret), VaultError> {
        let row = self
            .db
            .prepare_cached(
                "SELECT version, sealed FROM secret WHERE name = ?1 ORDER BY version DESC LIMIT 1",
            )
            .and_then(|mut statement| {
                let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, Vec<u8>>(1)?));
                statement.query_row([name], read).optional()
            })
            .map_err(failed("read"))?;
        let (version, sealed): (u64, _) =
            row.ok_or_else(|| VaultError::Missing(name.to_owned()))?;
        Ok((version, self.unseal(&["secret", name], version, &sealed)?))
    }

    /// Notes that nobody gives tokens for this version of a secret any more.
    pub(super) fn need_login(
        &self,
        name: &str,
        version: u64,
        reason: &str,
    ) -> Result<(), VaultError> {
        self.db
            .execute(
                "INSERT OR REPLACE INTO login VALUES (?1, ?2, ?3)",
                params![name, version, reason],
            )
            .map(drop)
            .map_err(failed("write"))
    }

    /// Why the current version of a secret gives no tokens, if that is so.
    pub(super) fn login_needed(&self, name: &str) -> Result<Option<String>, VaultError> {
        self.db
            .prepare_cached(
                "SELECT reason FROM login WHERE name = ?1 AND version =
                 (SELECT max(version) FROM secret WHERE name = ?1)",
            )
            .and_then(|mut statement| statement.query_row([name], |row| row.get(0)).optional())
            .map_err(failed("read"))
    }

    /// Forgets all tokens that were had for a secret.
    pub(super) fn drop_tokens(&self, name: &str) -> Result<(), VaultError> {
        self.db
            .execute("DELETE FROM token WHERE name = ?1", [name])
            .map(drop)
            .map_err(failed("write"))
    }

    /// Keeps a token that was had for a secret, until its end (seconds since 1970).
    pub(super) fn keep_token(
        &self,
        name: &str,
        granted: &str,
        token: &Secret,
        ends: u64,
    ) -> Result<(), VaultError> {
        let place = ["token", name, granted];
        let sealed = seal(self.rows.bytes(), &self.id, &place, ends, token.expose_secret())?;
        self.db
            .execute(
                "INSERT OR REPLACE INTO token VALUES (?1, ?2, ?3, ?4)",
                params![name, granted, ends, sealed],
            )
            .map(drop)
            .map_err(failed("write"))
    }

    /// A token that was kept, and its end.
    pub(super) fn token(
        &self,
        name: &str,
        granted: &str,
    ) -> Result<Option<(Secret, u64)>, VaultError> {
        let row: Option<(u64, Vec<u8>)> = self
            .db
            .query_row(
                "SELECT ends, sealed FROM token WHERE name = ?1 AND granted = ?2",
                [name, granted],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .optional()
            .map_err(failed("read"))?;
        let Some((ends, sealed)) = row else { return Ok(None) };
        Ok(Some((self.unseal(&["token", name, granted], ends, &sealed)?, ends)))
    }

    /// Notes that a server has made something that is to be revoked: its own name for it, and when
    /// it ends by itself (seconds since 1970).
    pub(super) fn keep_leased(&self, id: &str, ends: u64) -> Result<(), VaultError> {
        self.db
            .execute("INSERT OR REPLACE INTO leased VALUES (?1, ?2)", params![id, ends])
            .map(drop)
            .map_err(failed("write"))
    }

    /// It has ended.
    pub(super) fn drop_leased(&self, id: &str) -> Result<(), VaultError> {
        let dropped = self.db.execute("DELETE FROM leased WHERE id = ?1", [id]);
        dropped.map(drop).map_err(failed("write"))
    }

    /// What has not ended as far as is known.
    pub(super) fn leased(&self) -> Result<Vec<(String, u64)>, VaultError> {
        let read = failed("read");
        let mut statement = self.db.prepare("SELECT id, ends FROM leased").map_err(&read)?;
        let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).map_err(&read)?;
        rows.collect::<Result<_, _>>().map_err(&read)
    }

    /// Notes that a secret was used, at most once a minute.
    pub(super) fn used(&self, name: &str, now: i64) -> Result<(), VaultError> {
        self.db
            .prepare_cached(
                "INSERT INTO used VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET at = ?2
                 WHERE at + ?3 <= ?2",
            )
            .and_then(|mut statement| statement.execute(params![name, now, LAST_USE_SECONDS]))
            .map(drop)
            .map_err(failed("write"))
    }

    /// The authorities, the newest first.
    pub(super) fn authorities(&self) -> Result<Vec<Kept>, VaultError> {
        let read = failed("read");
        let mut statement = self
            .db
            .prepare(
                "SELECT number, not_before, not_after, certificate, sealed
                 FROM authority ORDER BY number DESC",
            )
            .map_err(&read)?;
        let rows = statement
            .query_map([], |row| {
                let key = Secret::new(Vec::new());
                let (not_before, not_after) = (row.get(1)?, row.get(2)?);
                let kept = Kept { certificate: row.get(3)?, key, not_before, not_after };
                Ok((row.get::<_, u64>(0)?, kept, row.get::<_, Vec<u8>>(4)?))
            })
            .map_err(&read)?;
        let mut authorities = Vec::new();
        for row in rows {
            let (number, mut kept, sealed) = row.map_err(&read)?;
            kept.key = self.unseal(&["authority", &summary(&kept)], number, &sealed)?;
            authorities.push(kept);
        }
        Ok(authorities)
    }

    pub(super) fn add_authority(&mut self, kept: &Kept) -> Result<(), VaultError> {
        let write = failed("write");
        let number: u64 = self
            .db
            .query_row("SELECT coalesce(max(number), 0) + 1 FROM authority", [], |row| row.get(0))
            .map_err(&write)?;
        let place = ["authority", &summary(kept)];
        let sealed = seal(self.rows.bytes(), &self.id, &place, number, kept.key.expose_secret())?;
        self.db
            .execute(
                "INSERT INTO authority VALUES (?1, ?2, ?3, ?4, ?5)",
                params![number, kept.not_before, kept.not_after, kept.certificate, sealed],
            )
            .map(drop)
            .map_err(&write)
    }

    /// Removes an authority; its sealed key is overwritten with it.
    pub(super) fn remove_authority(&self, certificate: &[u8]) -> Result<(), VaultError> {
        self.db
            .execute("DELETE FROM authority WHERE certificate = ?1", [certificate])
            .map(drop)
            .map_err(failed("write"))
    }

    /// Bytes that follow from this vault, the lease and the credential, and from nothing else.
    pub(super) fn placeholder_bytes(&self, lease: &str, credential: &str) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.placeholders.bytes())
            .expect("HMAC takes keys of any length");
        for text in [lease, credential] {
            mac.update(&(text.len() as u64).to_le_bytes());
            mac.update(text.as_bytes());
        }
        mac.finalize().into_bytes().into()
    }

    fn unseal(&self, place: &[&str], version: u64, sealed: &[u8]) -> Result<Secret, VaultError> {
        unseal_row(&self.rows, &self.id, place, version, sealed)
    }
}

fn unseal_row(
    rows: &LockedKey,
    id: &[u8],
    place: &[&str],
    version: u64,
    sealed: &[u8],
) -> Result<Secret, VaultError> {
    unseal(rows.bytes(), id, place, version, sealed).ok_or_else(|| {
        let place = place.join(" ");
        VaultError::Failed(format!("a row of the vault was changed from outside: {place}"))
    })
}

fn create(db: &mut Connection, material: &Material) -> Result<(), VaultError> {
    let make = failed("make");
    let mut id = vec![0u8; 16];
    let mut data_key = Zeroizing::new([0u8; KEY_BYTES]);
    fill(&mut id)?;
    fill(&mut *data_key)?;
    let wrapping = material.key(&id)?;
    let wrapped = seal(&wrapping, &id, &["data key"], 0, &*data_key)?;
    let transaction = db.transaction().map_err(&make)?;
    transaction.execute_batch(SCHEMA).map_err(&make)?;
    transaction
        .execute("INSERT INTO vault VALUES (1, ?1, ?2, ?3)", params![FORMAT, id, wrapped])
        .map_err(&make)?;
    transaction.commit().map_err(&make)
}

/// What lies in the open beside an authority's key, so that it cannot be changed either.
fn summary(kept: &Kept) -> String {
    let certificate = hex::encode(Sha256::digest(&kept.certificate));
    format!("{certificate} {} {}", kept.not_before, kept.not_after)
}

/// What no policy could name would be of no use to anybody.
fn check_name(name: &str) -> Result<(), VaultError> {
    match policies::is_secret_name(name) {
        true => Ok(()),
        false => Err(VaultError::Invalid(
            "a secret's name has 1 to 128 characters of A-Z a-z 0-9 . _ - and begins with a \
             letter or digit"
                .into(),
        )),
    }
}

fn check_value(value: &[u8]) -> Result<(), VaultError> {
    if value.len() < SECRET_BYTES_MIN {
        return Err(VaultError::Invalid(format!(
            "a secret has at least {SECRET_BYTES_MIN} bytes: a shorter one could not be told from \
             ordinary text in answers"
        )));
    }
    if value.len() > SECRET_BYTES_MAX {
        return Err(VaultError::Invalid(format!("a secret has at most {SECRET_BYTES_MAX} bytes")));
    }
    Ok(())
}

pub(super) fn rfc3339(seconds: i64) -> String {
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests;
