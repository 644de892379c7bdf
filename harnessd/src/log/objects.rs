//! The API's objects: versioned JSON documents with an owner, listed in order of creation.
//!
//! What a document means is the API's business. Every read and list names the owner, so that no
//! query can forget it.

use serde_json::Value;

use super::event::Status;
use super::{Log, LogError};

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
    pub body: Value,
    pub unique_name: Option<String>,
    /// The version it must have; else a conflict.
    pub expected_version: Option<u64>,
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
    /// Only documents whose top-level text or number fields have these values.
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
    pub async fn insert_object(&self, object: NewObject) -> Result<Object, LogError> {
        todo!()
    }

    /// One document of this owner; `version` none is the latest.
    pub async fn object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
        version: Option<u64>,
    ) -> Result<Object, LogError> {
        todo!()
    }

    pub async fn change_object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
        change: Change,
    ) -> Result<Object, LogError> {
        todo!()
    }

    /// Archives it, once; the second time changes nothing.
    pub async fn archive_object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
    ) -> Result<Object, LogError> {
        todo!()
    }

    /// Removes it and all its versions. Sessions go through [`Log::delete`] instead.
    pub async fn remove_object(
        &self,
        kind: &'static str,
        owner: &str,
        id: &str,
    ) -> Result<(), LogError> {
        todo!()
    }

    pub async fn list_objects(&self, query: ListQuery) -> Result<ObjectPage, LogError> {
        todo!()
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
        todo!()
    }
}
