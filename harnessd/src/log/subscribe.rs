//! Under way.
/// Follows a session.
pub struct Subscription {}
