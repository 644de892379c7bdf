//! Under way.
/// Ownership of a session by this process; the kernel lock falls with it.
pub struct Ownership {
    pub fence: u64,
}
