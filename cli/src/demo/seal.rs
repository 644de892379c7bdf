//! A process of its own that draws the demo's token, seals it in the vault and ends.
//!
//! What it leaves behind: one hash by which the billing API knows the token, and the fingerprints
//! by which the searcher would recognise it. The token itself is in the vault alone.

use std::process::ExitCode;

use ipc::http::Client;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::args::Global;
use crate::demo::fingerprint::Fingerprints;
use crate::failure::Failure;
use crate::{place, secret, term};

/// Name of the secret in the vault, as the demo's policy has it.
pub const SECRET: &str = "billing";
/// Characters of the token, five random bits each.
const TOKEN_CHARS: usize = 48;

/// How the token can be recognised.
#[derive(Debug, Serialize, Deserialize)]
pub struct Recognised {
    pub sha256: String,
    pub fingerprints: Vec<String>,
}

/// Draws, seals, prints how to recognise it, ends.
pub async fn main(global: &Global) -> Result<ExitCode, Failure> {
    let token = draw()?;
    let recognised = Recognised {
        sha256: hex::encode(Sha256::digest(&token)),
        fingerprints: Fingerprints::of(&token).to_lines(),
    };
    secret::store(&Client::new(place::layout(global).proxyd()), SECRET, token).await?;
    term::json_line(&recognised)?;
    Ok(ExitCode::SUCCESS)
}

/// A random text of the token's shape.
pub fn draw() -> Result<Zeroizing<Vec<u8>>, Failure> {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let mut token = Zeroizing::new(vec![0u8; TOKEN_CHARS]);
    getrandom::fill(&mut token)
        .map_err(|error| Failure::new(format!("cannot draw a token: {error}")))?;
    for byte in token.iter_mut() {
        *byte = ALPHABET[usize::from(*byte & 31)];
    }
    Ok(token)
}
