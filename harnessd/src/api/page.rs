//! Pages of the API's objects: from a query to a part of a list and the cursors around it.

use serde_json::{Value, json};

use super::ApiState;
use super::cursor::{Direction, Listing, Position};
use super::error::ApiError;
use super::query::{Order, Parameters, TimeRange};
use crate::log::objects::{self, ListQuery, Object};

/// Page sizes of agents and versions, as documented; sessions and environments state none and get
/// a larger maximum, since clients ask for more.
pub const DEFAULT: usize = 20;
pub const MAX: usize = 100;
pub const MAX_LARGE: usize = 1_000;

/// A part of a list, in the list's order.
pub struct Page {
    pub objects: Vec<Object>,
    pub next: Option<String>,
    pub prev: Option<String>,
}

/// What one list of objects may be asked for.
pub struct Asked {
    pub query: ListQuery,
    pub range: TimeRange,
    pub order: Order,
}

/// Reads `limit`, `order`, `include_archived` and `created_at[…]`.
pub fn asked(
    kind: &'static str,
    owner: &str,
    parameters: &Parameters,
    limit_max: usize,
) -> Result<Asked, ApiError> {
    let limit = parameters.limit(DEFAULT, limit_max)?;
    let order = parameters.order(Order::Desc)?;
    let range = parameters.created_at()?;
    let mut query = ListQuery::new(kind, owner, limit);
    query.include_archived = parameters.flag("include_archived")?;
    query.created_gt.clone_from(&range.gt);
    query.created_gte.clone_from(&range.gte);
    query.created_lt.clone_from(&range.lt);
    query.created_lte.clone_from(&range.lte);
    Ok(Asked { query, range, order })
}

/// Reads the page that `page` names, or the first.
pub async fn read(
    state: &ApiState,
    asked: Asked,
    parameters: &Parameters,
) -> Result<Page, ApiError> {
    let Asked { mut query, range, order } = asked;
    let listing = Listing { kind: query.kind, scope: "", order };
    let position = parameters.one("page")?.map(|text| listing.position(text)).transpose()?;
    let direction = position.as_ref().map_or(Direction::After, |position| position.direction);
    query.after = position.as_ref().map(|position| behind(position, &range)).transpose()?;
    let forward = match order {
        Order::Asc => objects::Order::Oldest,
        Order::Desc => objects::Order::Newest,
    };
    query.order = match (direction, forward) {
        (Direction::After, forward) => forward,
        (Direction::Before, objects::Order::Oldest) => objects::Order::Newest,
        (Direction::Before, objects::Order::Newest) => objects::Order::Oldest,
    };
    let found = state.engine.log().list_objects(query).await?;
    let mut objects = found.objects;
    let (has_next, has_prev) = match direction {
        Direction::After => (found.more, position.is_some()),
        Direction::Before => {
            objects.reverse();
            (true, found.more)
        }
    };
    let cursor = |direction, object: Option<&Object>| {
        object.map(|o| listing.cursor(direction, &format!("{}|{}", o.position, o.created_at)))
    };
    let next = cursor(Direction::After, objects.last()).filter(|_| has_next);
    let prev = cursor(Direction::Before, objects.first()).filter(|_| has_prev);
    Ok(Page { objects, next, prev })
}

/// The position of a cursor, which the filter on time must not exclude.
fn behind(position: &Position, range: &TimeRange) -> Result<i64, ApiError> {
    let parts = position.key.split_once('|');
    let (number, time) =
        parts.ok_or_else(|| ApiError::field("page", "not a cursor of this list"))?;
    if !range.contains(time) {
        return Err(ApiError::field("page", "the cursor lies outside the created_at filter"));
    }
    number.parse().map_err(|_| ApiError::field("page", "not a cursor of this list"))
}

/// The body of a list's answer.
pub fn body(data: Vec<Value>, next: Option<String>) -> Value {
    json!({ "data": data, "next_page": next })
}
