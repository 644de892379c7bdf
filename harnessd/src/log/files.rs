//! The bytes of uploaded files, in parts: beside the objects that say what they are.
//!
//! Parts come first and one by one, so that no upload holds the writer up; the object that makes
//! them a file comes last. Parts that never became a file go at the next start.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, params, params_from_iter};

use super::objects::{NewObject, Object, insert};
use super::{Log, LogError, now};

/// The kind of their objects.
pub const FILE: &str = "file";

impl Log {
    /// Stores one part of a file to be, counted from 0.
    pub async fn put_file_part(
        &self,
        file: &str,
        number: u32,
        bytes: Bytes,
    ) -> Result<(), LogError> {
        let file = file.to_owned();
        let work = move |connection: &Connection| {
            let sql = "INSERT INTO file_parts (file, number, bytes) VALUES (?1, ?2, ?3)";
            connection.execute(sql, params![file, number, bytes.as_ref()])?;
            Ok(())
        };
        self.inner.writer.run(work).await
    }

    /// Makes a file of its parts, of which there must be as many bytes.
    pub async fn insert_file(&self, object: NewObject, bytes: u64) -> Result<Object, LogError> {
        let work = move |connection: &Connection| {
            let sql = "SELECT coalesce(sum(length(bytes)), 0) FROM file_parts WHERE file = ?1";
            let found: u64 = connection.query_row(sql, [&object.id], |row| row.get(0))?;
            if found != bytes {
                // Another process of this log has started meanwhile and tidied up.
                let text = format!("file {}: parts of it were lost: upload it again", object.id);
                return Err(LogError::Conflict(text));
            }
            insert(connection, &object, &now())?;
            super::objects::load(connection, object.kind, &object.owner, &object.id)
        };
        self.inner.writer.run(work).await
    }

    /// One part of a file; none behind the last.
    pub async fn file_part(&self, file: &str, number: u32) -> Result<Option<Bytes>, LogError> {
        let file = file.to_owned();
        self.read(move |connection| {
            let sql = "SELECT bytes FROM file_parts WHERE file = ?1 AND number = ?2";
            let part: Option<Vec<u8>> = connection
                .prepare_cached(sql)?
                .query_row(params![file, number], |row| row.get(0))
                .optional()?;
            Ok(part.map(Bytes::from))
        })
        .await
    }

    /// What all files of an owner take.
    pub async fn files_bytes(&self, owner: &str) -> Result<u64, LogError> {
        let owner = owner.to_owned();
        self.read(move |connection| {
            let sql = "SELECT coalesce(sum(length(bytes)), 0) FROM file_parts WHERE file IN
                       (SELECT id FROM objects WHERE kind = ?1 AND owner = ?2)";
            Ok(connection.query_row(sql, [FILE, &owner], |row| row.get(0))?)
        })
        .await
    }

    /// Removes the parts of a file that did not come to be.
    pub async fn drop_file_parts(&self, file: &str) -> Result<(), LogError> {
        let file = file.to_owned();
        let work = move |connection: &Connection| remove_parts(connection, &file);
        self.inner.writer.run(work).await
    }

    /// Removes a file and its bytes.
    pub async fn remove_file(&self, owner: &str, id: &str) -> Result<(), LogError> {
        self.remove_object(FILE, owner, id).await?;
        self.drop_file_parts(id).await
    }

    /// Removes the files of a session that is gone.
    pub async fn remove_files_of(&self, owner: &str, session: &str) -> Result<(), LogError> {
        let (owner, session) = (owner.to_owned(), session.to_owned());
        let work = move |connection: &Connection| {
            let of = "kind = ?1 AND owner = ?2 AND json_extract(body, '$.scope.id') = ?3";
            remove(connection, of, &[FILE, &owner, &session])
        };
        self.inner.writer.run(work).await
    }

    /// Removes files whose time is over.
    pub async fn expire_files(&self) -> Result<(), LogError> {
        let due = "kind = ?1 AND json_extract(body, '$.expires_at') <= ?2";
        let count = format!("SELECT count(*) FROM objects WHERE {due}");
        let time = now();
        let read = move |connection: &Connection| {
            Ok(connection.query_row(&count, [FILE, &time], |row| row.get::<_, u64>(0))?)
        };
        if self.read(read).await? == 0 {
            return Ok(());
        }
        let work = move |connection: &Connection| remove(connection, due, &[FILE, &now()]);
        self.inner.writer.run(work).await
    }

    /// Removes what uploads that broke off have left.
    pub async fn break_uploads_off(&self) -> Result<(), LogError> {
        self.inner.writer.run(remove_orphans).await
    }
}

fn remove_parts(connection: &Connection, file: &str) -> Result<(), LogError> {
    connection.execute("DELETE FROM file_parts WHERE file = ?1", [file])?;
    Ok(())
}

/// Removes files and their bytes; parts of uploads under way stay.
fn remove(connection: &Connection, which: &str, values: &[&str]) -> Result<(), LogError> {
    let parts = "DELETE FROM file_parts WHERE file IN (SELECT id FROM objects WHERE";
    connection.execute(&format!("{parts} {which})"), params_from_iter(values))?;
    connection.execute(&format!("DELETE FROM objects WHERE {which}"), params_from_iter(values))?;
    Ok(())
}

fn remove_orphans(connection: &Connection) -> Result<(), LogError> {
    let sql = "DELETE FROM file_parts WHERE file NOT IN
               (SELECT id FROM objects WHERE kind = ?1)";
    connection.execute(sql, [FILE])?;
    Ok(())
}
