//! The policy files that come with Cleanhands, for the demo, first use and tests.

/// Name and text of every shipped file, as [`crate::PolicySet::parse`] takes them.
pub const SHIPPED: &[(&str, &str)] = &[
    ("demo.toml", include_str!("../demo.toml")),
    ("dev.toml", include_str!("../dev.toml")),
    ("groups.toml", include_str!("../groups.toml")),
    ("harness.toml", include_str!("../harness.toml")),
    ("locked.toml", include_str!("../locked.toml")),
    ("packages.toml", include_str!("../packages.toml")),
];
