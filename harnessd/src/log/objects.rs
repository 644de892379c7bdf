//! The API's objects: versioned JSON documents with an owner, listed in order of creation.
//!
//! What a document means is the API's business. Every read and list names the owner, so that no
//! query can forget it.

use rusqlite::types::Value as SqlValue;
use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use serde_json::Value;

use super::event::Status;
use super::{Log, LogError, now};

/// A document as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// `agent`, `environment`, `session`, …
    pub kind: String,
    pub id: String,
    /// From 1.
    pub version: u64,
    pub owner: String,
    pub body: Value,
    /// RFC 3339 in UTC, milliseconds.
    pub created_at: String,
    pub updated_at: String,
    pub archived_at: Option<String>,
    /// Place in the order of creation over all objects: what cursors hold.
    pub position: i64,
}

/// A document to be stored.
#[derive(Clone, Debug)]
pub struct NewObject {
    pub kind: &'static str,
    pub id: String,
    pub owner: String,
    /// Where set, no two living (not archived) objects of a kind and owner share it.
    pub unique_name: Option<String>,
    pub body: Value,
}

/// How to change a document.
#[derive(Clone, Debug)]
pub struct Change {
    /// What the new one was made from. When another is stored by now, nothing is changed.
    pub from: Object,
    pub body: Value,
    pub unique_name: Option<String>,
    /// Keep the old version beside a new one; else the document is replaced in place.
    pub new_version: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Oldest,
    Newest,
}

/// What to list. The default limits nothing; `limit` must be set.
#[derive(Clone, Debug)]
pub struct ListQuery {
    pub kind: &'static str,
    pub owner: String,
    pub include_archived: bool,
    pub order: Order,
    pub limit: usize,
    /// Begin behind this position, in the order asked for.
    pub after: Option<i64>,
    pub created_gt: Option<String>,
    pub created_gte: Option<String>,
    pub created_lt: Option<String>,
    pub created_lte: Option<String>,
    /// For kind `session`: only these statuses; empty means all.
    pub statuses: Vec<Status>,
    /// Only documents with these texts or numbers at these places: `agent.id`.
    pub fields: Vec<(String, Value)>,
}

impl ListQuery {
    pub fn new(kind: &'static str, owner: impl Into<String>, limit: usize) -> Self {
        Self {
            kind,
            owner: owner.into(),
            include_archived: false,
            order: Order::Newest,
            limit,
            after: None,
            created_gt: None,
            created_gte: None,
            created_lt: None,
            created_lte: None,
            statuses: Vec::new(),
            fields: Vec::new(),
        }
    }
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct ObjectPage {
    pub objects: Vec<Object>,
    /// Whether more follow behind the last one.
    pub more: bool,
}

impl Log {
    /// Stores a new document, version 1.
    pub async fn insert_object(&self, object: NewObject) -> Result<Object, LogError> {
        self.inner
            .writer
            .run(move |connection| {
                insert(connection, &object, &now())?;
                load(connection, object.kind, &object.owner, &object.id)
            })
            .await
    }

    /// One document of this owner; `version` none is the latest.
    pub async fn object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
        version: Option<u64>,
    ) -> Result<Object, LogError> {
        let (owner, id) = (owner.to_owned(), id.to_owned());
        self.read(move |connection| {
            let mut object = load(connection, kind, &owner, &id)?;
            if let Some(wanted) = version.filter(|v| *v != object.version) {
                let sql = "SELECT body, updated_at FROM object_versions
                           WHERE kind = ?1 AND id = ?2 AND version = ?3";
                let found: Option<(String, String)> = connection
                    .query_row(sql, params![kind, id, wanted], |row| Ok((row.get(0)?, row.get(1)?)))
                    .optional()?;
                let (body, updated_at) = found.ok_or_else(|| absent(kind, &id))?;
                object.version = wanted;
                object.body = parse(&body)?;
                object.updated_at = updated_at;
            }
            Ok(object)
        })
        .await
    }

    /// Replaces a document, or puts a new version beside the old one.
    pub async fn change_object(&self, change: Change) -> Result<Object, LogError> {
        self.inner.writer.run(move |connection| replace(connection, &change, &now())).await
    }

    /// Archives it, once; the second time changes nothing.
    pub async fn archive_object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
    ) -> Result<Object, LogError> {
        let (owner, id) = (owner.to_owned(), id.to_owned());
        let work = move |connection: &Connection| {
            load(connection, kind, &owner, &id)?;
            let sql = "UPDATE objects SET archived_at = ?3, updated_at = ?3
                       WHERE kind = ?1 AND id = ?2 AND archived_at IS NULL";
            connection.execute(sql, params![kind, id, now()])?;
            load(connection, kind, &owner, &id)
        };
        self.inner.writer.run(work).await
    }

    /// Removes it and all its versions. Sessions go through [`Log::delete`] instead.
    pub async fn remove_object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
    ) -> Result<(), LogError> {
        let (owner, id) = (owner.to_owned(), id.to_owned());
        let work = move |connection: &Connection| {
            load(connection, kind, &owner, &id)?;
            for table in ["objects", "object_versions"] {
                let sql = format!("DELETE FROM {table} WHERE kind = ?1 AND id = ?2");
                connection.execute(&sql, params![kind, id])?;
            }
            Ok(())
        };
        self.inner.writer.run(work).await
    }

    /// A part of the documents of one kind and owner.
    pub async fn list_objects(&self, query: ListQuery) -> Result<ObjectPage, LogError> {
        self.read(move |connection| list(connection, &query)).await
    }

    /// The versions of one document, newest first, below version `before`.
    pub async fn object_versions(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
        before: Option<u64>,
        limit: usize,
    ) -> Result<ObjectPage, LogError> {
        let (owner, id) = (owner.to_owned(), id.to_owned());
        self.read(move |connection| {
            let latest = load(connection, kind, &owner, &id)?;
            let below = before.unwrap_or(u64::from(u32::MAX));
            let mut objects = Vec::new();
            if latest.version < below {
                objects.push(latest.clone());
            }
            let sql = "SELECT version, body, updated_at FROM object_versions
                       WHERE kind = ?1 AND id = ?2 AND version < ?3
                       ORDER BY version DESC LIMIT ?4";
            let mut statement = connection.prepare_cached(sql)?;
            let mut rows = statement.query(params![kind, id, below, limit + 1])?;
            while let Some(row) = rows.next()? {
                let body: String = row.get(1)?;
                let (version, updated_at) = (row.get(0)?, row.get(2)?);
                let body = parse(&body)?;
                objects.push(Object { version, updated_at, body, ..latest.clone() });
            }
            let more = objects.len() > limit;
            objects.truncate(limit);
            Ok(ObjectPage { objects, more })
        })
        .await
    }
}

/// Stores a new document within somebody's transaction.
pub(super) fn insert(
    connection: &Connection,
    object: &NewObject,
    time: &str,
) -> Result<(), LogError> {
    let sql = "INSERT INTO objects (kind, id, version, owner, unique_name, body, created_at,
               updated_at) VALUES (?1, ?2, 1, ?3, ?4, ?5, ?6, ?6)";
    let NewObject { kind, id, owner, unique_name, body } = object;
    let values = params![kind, id, owner, unique_name, body.to_string(), time];
    connection.execute(sql, values).map_err(|e| taken(e, kind, unique_name))?;
    Ok(())
}

/// Changes a document within somebody's transaction.
pub(super) fn replace(
    connection: &Connection,
    change: &Change,
    time: &str,
) -> Result<Object, LogError> {
    let Object { kind, id, owner, .. } = &change.from;
    let old = load(connection, kind, owner, id)?;
    let facts = |object: &Object| (object.version, object.archived_at.clone());
    if facts(&old) != facts(&change.from) || old.body != change.from.body {
        return Err(LogError::Overtaken { kind: kind.clone(), id: id.clone() });
    }
    let mut version = old.version;
    if change.new_version {
        let sql = "INSERT INTO object_versions (kind, id, version, body, updated_at)
                   VALUES (?1, ?2, ?3, ?4, ?5)";
        let values = params![kind, id, old.version, old.body.to_string(), old.updated_at];
        connection.execute(sql, values)?;
        version += 1;
    }
    let sql = "UPDATE objects SET version = ?3, body = ?4, unique_name = ?5, updated_at = ?6
               WHERE kind = ?1 AND id = ?2";
    let values = params![kind, id, version, change.body.to_string(), change.unique_name, time];
    connection.execute(sql, values).map_err(|e| taken(e, kind, &change.unique_name))?;
    load(connection, kind, owner, id)
}

fn taken(error: rusqlite::Error, kind: &str, name: &Option<String>) -> LogError {
    match (&error, name) {
        (rusqlite::Error::SqliteFailure(failure, Some(text)), Some(name))
            if failure.code == rusqlite::ErrorCode::ConstraintViolation
                && text.contains("unique_name") =>
        {
            LogError::Conflict(format!("there is already one named {name:?} among your {kind}s"))
        }
        _ => error.into(),
    }
}

fn absent(kind: &str, id: &str) -> LogError {
    LogError::NoObject { kind: kind.to_owned(), id: id.chars().take(128).collect() }
}

fn parse(body: &str) -> Result<Value, LogError> {
    serde_json::from_str(body).map_err(|e| LogError::Conflict(format!("stored object: {e}")))
}

const COLUMNS: &str = "o.kind, o.id, o.version, o.owner, o.body, o.created_at, o.updated_at,
                       o.archived_at, o.position";

fn decode(row: &Row<'_>) -> Result<Object, LogError> {
    let body: String = row.get(4)?;
    Ok(Object {
        kind: row.get(0)?,
        id: row.get(1)?,
        version: row.get(2)?,
        owner: row.get(3)?,
        body: parse(&body)?,
        created_at: row.get(5)?,
        updated_at: row.get(6)?,
        archived_at: row.get(7)?,
        position: row.get(8)?,
    })
}

pub(super) fn load(
    connection: &Connection,
    kind: &str,
    owner: &str,
    id: &str,
) -> Result<Object, LogError> {
    let sql =
        format!("SELECT {COLUMNS} FROM objects o WHERE o.kind = ?1 AND o.id = ?2 AND o.owner = ?3");
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query([kind, id, owner])?;
    match rows.next()? {
        Some(row) => decode(row),
        None => Err(absent(kind, id)),
    }
}

fn list(connection: &Connection, query: &ListQuery) -> Result<ObjectPage, LogError> {
    let mut wanted: Vec<(String, SqlValue)> = vec![
        ("o.kind = ?".into(), query.kind.to_owned().into()),
        ("o.owner = ?".into(), query.owner.clone().into()),
    ];
    let (direction, behind) = match query.order {
        Order::Oldest => ("ASC", ">"),
        Order::Newest => ("DESC", "<"),
    };
    if let Some(position) = query.after {
        wanted.push((format!("o.position {behind} ?"), position.into()));
    }
    let times = [
        (">", &query.created_gt),
        (">=", &query.created_gte),
        ("<", &query.created_lt),
        ("<=", &query.created_lte),
    ];
    for (operator, time) in times {
        if let Some(time) = time {
            wanted.push((format!("o.created_at {operator} ?"), time.clone().into()));
        }
    }
    for (path, value) in &query.fields {
        wanted.push(("json_extract(o.body, ?) = ?".into(), format!("$.{path}").into()));
        wanted.push((String::new(), sql_value(value)));
    }
    let mut sql = format!("SELECT {COLUMNS} FROM objects o WHERE 1");
    for (condition, _) in wanted.iter().filter(|(text, _)| !text.is_empty()) {
        sql += &format!(" AND {condition}");
    }
    if !query.include_archived {
        sql += " AND o.archived_at IS NULL";
    }
    if !query.statuses.is_empty() {
        // Our own words, never the caller's.
        let names: Vec<_> = query.statuses.iter().map(|s| format!("'{}'", s.as_str())).collect();
        let names = names.join(", ");
        sql += &format!(" AND o.id IN (SELECT session FROM chains WHERE status IN ({names}))");
    }
    sql += &format!(" ORDER BY o.position {direction} LIMIT {}", query.limit + 1);
    let mut statement = connection.prepare_cached(&sql)?;
    let mut rows = statement.query(params_from_iter(wanted.into_iter().map(|(_, v)| v)))?;
    let mut objects = Vec::new();
    while let Some(row) = rows.next()? {
        objects.push(decode(row)?);
    }
    let more = objects.len() > query.limit;
    objects.truncate(query.limit);
    Ok(ObjectPage { objects, more })
}

fn sql_value(value: &Value) -> SqlValue {
    match value {
        Value::String(text) => text.clone().into(),
        Value::Number(number) => number.as_i64().map_or(SqlValue::Null, Into::into),
        Value::Bool(truth) => i64::from(*truth).into(),
        _ => SqlValue::Null,
    }
}
