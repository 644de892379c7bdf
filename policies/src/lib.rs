//! What a policy file is and how a decision is made, in order.
//!
//! One file `NAME.toml` is one environment: what its sandboxes may use ([`sandbox`]), what may
//! leave them ([`egress`]), and which credentials are put into what leaves ([`credential`]).
//! Files hold names, never values. `policy.5` documents every key.
//!
//! A decision takes these steps, and nothing else has a say:
//!
//! 1. The host is brought to one canonical form ([`host`]), the path too ([`path`]).
//! 2. Rules are tried in the order of the file; the first that matches host, port, scheme, method
//!    and path decides ([`egress`], [`pattern`]). No rule, no way out.
//! 3. The answer is a [`Permit`], which only this crate can make, or a [`Denial`] that a person
//!    or a model can read ([`denial`]).
//! 4. Before the dial, the permit judges the address that the name resolved to ([`address`]).
//!
//! Reading starts in [`set`] and [`file`]; mistakes come out as [`diagnostic`]s. Everything here is
//! pure, but for `load`, which reads a directory. No clock, no secrets, no sockets.
#![forbid(unsafe_code)]

pub mod address;
pub mod aws;
pub mod credential;
pub mod denial;
pub mod diagnostic;
pub mod egress;
pub mod explain;
mod file;
pub mod host;
mod load;
pub mod path;
pub mod pattern;
pub mod policy;
pub mod sandbox;
pub mod set;
mod shipped;
mod uses;

pub use address::AddressRange;
pub use aws::{AwsEntry, AwsVersion};
pub use credential::{
    Backend, Client, ClientAuth, Credential, Entry, Grant, GrantKind, Inject, Made, Place,
    SecretRef, When, is_secret_name,
};
pub use denial::{Denial, DenialCode};
pub use diagnostic::{Diagnostic, Severity};
pub use egress::{ConnectDecision, Decision, EgressRequest, Permit, Scheme};
pub use explain::explain;
pub use file::{
    CA_BUNDLE_VARIABLES, CA_EXTRA_VARIABLES, KEYS, is_own_variable, split_url,
    units::{bytes as byte_size, time as time_span},
};
pub use host::{Host, HostError};
pub use pattern::HostPattern;
pub use policy::{Access, McpServer, Policy};
pub use sandbox::{Mount, Packages, Root, SandboxTable};
pub use set::{HARNESS, PolicySet};
pub use shipped::SHIPPED;
