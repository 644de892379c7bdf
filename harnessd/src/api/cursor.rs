//! Page cursors: opaque texts that hold where a list goes on, and which list it was.
//!
//! A cursor names its list, its scope (a session, or nothing) and its order, and is refused for any
//! other. It carries no right: owner and filters are applied again to every page.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::error::ApiError;
use super::query::Order;

/// Longest cursor accepted, in bytes. Ours stay below 200.
const CURSOR_BYTES_MAX: usize = 512;
/// Version of the text inside.
const VERSION: &str = "1";

/// Which way a page lies from its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// What follows the position, in list order.
    After,
    /// What precedes it.
    Before,
}

/// Where a page begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub direction: Direction,
    /// The key of the element next to the page: a sequence number, or an id.
    pub key: String,
}

/// The list that cursors belong to.
#[derive(Clone, Debug)]
pub struct Listing<'a> {
    pub kind: &'static str,
    /// The session of an event list, the agent of a version list; empty elsewhere.
    pub scope: &'a str,
    pub order: Order,
}

impl Listing<'_> {
    pub fn cursor(&self, direction: Direction, key: &str) -> String {
        let direction = match direction {
            Direction::After => "after",
            Direction::Before => "before",
        };
        let order = self.order.as_str();
        let text = format!("{VERSION}|{}|{}|{order}|{direction}|{key}", self.kind, self.scope);
        format!("page_{}", URL_SAFE_NO_PAD.encode(text))
    }

    /// Reads a cursor of this very list.
    pub fn position(&self, cursor: &str) -> Result<Position, ApiError> {
        let bad = || ApiError::field("page", "not a cursor of this list");
        if cursor.len() > CURSOR_BYTES_MAX {
            return Err(bad());
        }
        let encoded = cursor.strip_prefix("page_").ok_or_else(bad)?;
        let bytes = URL_SAFE_NO_PAD.decode(encoded).map_err(|_| bad())?;
        let text = String::from_utf8(bytes).map_err(|_| bad())?;
        let parts: Vec<&str> = text.splitn(6, '|').collect();
        let [version, kind, scope, order, direction, key] = parts[..] else { return Err(bad()) };
        if version != VERSION || kind != self.kind || scope != self.scope {
            return Err(bad());
        }
        if order != self.order.as_str() {
            return Err(ApiError::field("page", "the cursor belongs to the other order"));
        }
        let direction = match direction {
            "after" => Direction::After,
            "before" => Direction::Before,
            _ => return Err(bad()),
        };
        Ok(Position { direction, key: key.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(scope: &str, order: Order) -> Listing<'_> {
        Listing { kind: "events", scope, order }
    }

    #[test]
    fn a_cursor_comes_back_as_its_position() {
        let list = listing("sesn_1", Order::Asc);

        let cursor = list.cursor(Direction::After, "17|a");

        let expected = Position { direction: Direction::After, key: "17|a".into() };
        assert_eq!(list.position(&cursor), Ok(expected));
    }

    #[test]
    fn a_cursor_of_another_list_order_or_session_is_refused() {
        let cursor = listing("sesn_1", Order::Asc).cursor(Direction::After, "17");

        assert!(listing("sesn_2", Order::Asc).position(&cursor).is_err());
        assert!(listing("sesn_1", Order::Desc).position(&cursor).is_err());
        let other = Listing { kind: "agents", scope: "sesn_1", order: Order::Asc };
        assert!(other.position(&cursor).is_err());
    }

    #[test]
    fn garbage_is_refused_without_a_panic() {
        for bad in ["", "page_", "page_!!!", "page_AAAA", "17", &"page_A".repeat(200)] {
            assert!(listing("s", Order::Asc).position(bad).is_err(), "{bad:?} was accepted");
        }
    }
}
