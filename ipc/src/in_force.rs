//! Which files a daemon goes by, and which state of them: what its health answers, so that the
//! command can compare it with the files as they are and with the other daemons.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The files of one daemon. Digests are SHA-256, in hex.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InForce {
    /// The directory of the policies.
    #[serde(default)]
    pub policies: Option<PathBuf>,
    /// Of the policies' names and texts; none while there are none.
    #[serde(default)]
    pub policies_sha256: Option<String>,
    /// The configuration file, whether it is there or not.
    #[serde(default)]
    pub config: Option<PathBuf>,
    /// Of its text; none where there was no file.
    #[serde(default)]
    pub config_sha256: Option<String>,
}

/// The digest of a configuration file's text.
pub fn sha256(text: impl AsRef<[u8]>) -> String {
    hex::encode(Sha256::digest(text.as_ref()))
}
