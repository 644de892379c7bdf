//! What a session is given beside its workspace: read from a request, with its place in sandboxes.
//!
//! Files alone: repositories and memory stores are refused by name. Their places lie below one
//! directory, whatever a request says.

use ipc::sandbox::UPLOADS;
use serde_json::Value;

use super::error::ApiError;
use super::fields::Fields;

/// The documented maximum of a session.
pub const RESOURCES_MAX: usize = 500;
const ID_CHARS_MAX: usize = ipc::id::ID_BYTES_MAX;
const PATH_CHARS_MAX: usize = 1_024;
const PATH_PARTS_MAX: usize = 20;
const PART_BYTES_MAX: usize = 255;

/// A file that a session is to be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    /// Where the request names it.
    pub path: String,
    pub file_id: String,
    /// Below [`UPLOADS`].
    pub below: String,
}

impl Given {
    /// The path as sandboxes see it.
    pub fn mount_path(&self) -> String {
        format!("{UPLOADS}/{}", self.below)
    }
}

/// Reads one entry of `resources`, or the body that adds one.
pub fn read(path: &str, value: &Value) -> Result<Given, ApiError> {
    let mut fields = Fields::of(path, value)?;
    match fields.kind()? {
        "file" => {}
        kind @ ("github_repository" | "memory_store") => {
            let field = fields.path("type");
            return Err(ApiError::unsupported(&format!("{field}: {kind}")));
        }
        _ => return Err(ApiError::field(&fields.path("type"), "must be file")),
    }
    let file_id = fields.required_text("file_id", ID_CHARS_MAX)?;
    let place = fields.path("mount_path");
    let below = match fields.text("mount_path", PATH_CHARS_MAX)?.value() {
        Some(text) => below(&place, &text)?,
        None => below(&fields.path("file_id"), &file_id)?,
    };
    fields.finish()?;
    Ok(Given { path: path.to_owned(), file_id, below })
}

/// A path below [`UPLOADS`], which it may or may not begin with.
fn below(field: &str, text: &str) -> Result<String, ApiError> {
    let inside = text.strip_prefix(UPLOADS).filter(|rest| rest.starts_with('/')).unwrap_or(text);
    let inside = inside.strip_prefix('/').unwrap_or(inside);
    let plain = |part: &str| {
        let dots = matches!(part, "" | "." | "..");
        !dots && part.len() <= PART_BYTES_MAX && !part.starts_with(".part-")
    };
    let parts = inside.split('/').count();
    if parts > PATH_PARTS_MAX || !inside.split('/').all(plain) || inside.contains(char::is_control)
    {
        let why = format!(
            "must be a path below {UPLOADS} of at most {PATH_PARTS_MAX} names, without `.`, `..` \
             and control characters"
        );
        return Err(ApiError::field(field, why));
    }
    Ok(inside.to_owned())
}

/// Refuses a place that is taken, by a file or by the directory of one.
pub fn check_place(given: &Given, others: &[String]) -> Result<(), ApiError> {
    let mine = given.mount_path();
    let in_way = |other: &&String| {
        let inside = |inner: &str, outer: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.starts_with('/'))
        };
        **other == mine || inside(other, &mine) || inside(&mine, other)
    };
    match others.iter().find(in_way) {
        None => Ok(()),
        Some(other) => {
            let field = if given.path.is_empty() {
                "mount_path"
            } else {
                &format!("{}.mount_path", given.path)
            };
            Err(ApiError::field(field, format!("{mine}: {other} is there already")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn at(place: &str) -> Result<String, ApiError> {
        let body = json!({ "type": "file", "file_id": "file_1", "mount_path": place });
        read("", &body).map(|given| given.mount_path())
    }

    #[test]
    fn every_place_lies_below_the_one_directory() {
        let bare = read("", &json!({ "type": "file", "file_id": "file_1" })).unwrap();

        assert_eq!(bare.mount_path(), "/mnt/session/uploads/file_1");
        for same in ["a/b.csv", "/a/b.csv", "/mnt/session/uploads/a/b.csv"] {
            assert_eq!(at(same).unwrap(), "/mnt/session/uploads/a/b.csv", "{same}");
        }
        let aside = at("/mnt/session/uploadsx/b").unwrap();
        assert_eq!(aside, "/mnt/session/uploads/mnt/session/uploadsx/b");
        for bad in ["", "/", "..", "a/../b", "./a", "a//b", "a/", "a\nb", "a\0b", ".part-x"] {
            let error = at(bad).unwrap_err();
            assert!(error.message.starts_with("mount_path: must be a path"), "{bad:?}: {error}");
        }
    }

    #[test]
    fn a_place_that_is_taken_or_inside_another_is_refused() {
        let body = json!({ "type": "file", "file_id": "file_1", "mount_path": "a/b" });
        let given = read("resources[1]", &body).unwrap();
        let check = |other: &str| check_place(&given, &[format!("{UPLOADS}/{other}")]);

        for free in ["a/c", "a/bc", "b"] {
            assert_eq!(check(free), Ok(()), "{free}");
        }
        for taken in ["a", "a/b", "a/b/c"] {
            let error = check(taken).unwrap_err();
            assert!(error.message.starts_with("resources[1].mount_path"), "{taken}: {error}");
        }
    }

    #[test]
    fn what_is_no_file_is_refused_by_name() {
        for (kind, expected) in [
            ("github_repository", "resources[0].type: github_repository: not supported"),
            ("memory_store", "resources[0].type: memory_store: not supported"),
            ("later", "resources[0].type: must be file"),
        ] {
            let error = read("resources[0]", &json!({ "type": kind })).unwrap_err();
            assert!(error.message.starts_with(expected), "{error}");
        }
    }
}
