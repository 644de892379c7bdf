//! The messages between proxyd's processes: a JSON head with names, then secret parts.
//!
//! A frame is a length (four bytes, little endian) and a body: the question's number, the head's
//! length, the head, and for each part its length and bytes. Secrets travel only in parts, so no
//! JSON buffer ever holds one. Both sides bound every length before they make room for it. An
//! answer has the number of its question; answers may come in another order than questions.

use ipc::vault::SecretInfo;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::VaultError;
use super::registry::Access;
use super::secret::Secret;
use crate::tls::authority::{AuthorityId, Public};

/// Longest frame: the forms of two secrets of the greatest length, or what one call may have
/// searched, and room.
pub const FRAME_BYTES_MAX: usize = 33 << 20;
/// Most parts in a frame.
const PARTS_MAX: usize = 4096;

/// What the traffic process asks. Its whole interface to the secrets.
#[derive(Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// → [`Reply::Text`].
    Placeholder { lease: String, credential: String, prefix: String },
    /// → [`Reply::Rendered`] with what to put in, then the needles to search for.
    Render {
        credential: Named,
        host: String,
        /// For what is signed.
        #[serde(default)]
        scope: Option<Scope>,
        /// What is wanted of a registry.
        #[serde(default)]
        access: Option<Access>,
        /// On behalf of which lease, for what a server makes for each.
        #[serde(default)]
        lease: Option<String>,
        /// A token that the upstream refused: another one is wanted.
        #[serde(default)]
        refused: Option<u64>,
    },
    /// A lease has ended: what was made for it is revoked. → [`Reply::Done`].
    Forget { lease: String },
    /// A password for an upstream proxy: a secret that no policy names, for Basic.
    /// → [`Reply::Rendered`].
    Password { secret: String, user: String },
    /// Part: what a client signs in a TLS handshake with that host, in which it has shown the
    /// certificates of the digest `shown`. → [`Reply::Done`] with the signature.
    Sign { credential: Named, host: String, scheme: u16, shown: String },
    /// Parts: texts that a tool put out in a sandbox of that environment. → [`Reply::Masked`] with
    /// the same texts, masked.
    Mask { environment: String },
    /// Part: the value. → [`Reply::Secrets`] with one entry.
    Put { name: String },
    /// → [`Reply::Secrets`].
    List,
    /// → [`Reply::Done`].
    Remove { name: String },
    /// → [`Reply::Sealed`]: everything is under a new data key.
    Rotate,
    /// → [`Reply::Done`]: another key around the data key.
    Rewrap,
    /// Part: the public key, DER. → [`Reply::Leaf`] with the certificate, DER.
    Leaf { authority: AuthorityId, host: String, life_seconds: u64 },
    /// Retires former authorities that are not used, and makes the next one where that is wanted
    /// or due. → [`Reply::Authorities`].
    Authorities { wanted: bool, used: Vec<AuthorityId> },
}

/// A credential as policies define it, which the vault reads itself.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    pub environment: String,
    pub name: String,
    /// Of the definition that the asker has in mind: another one is another credential.
    pub print: String,
}

/// What a signing key is good for.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    /// `20261129`.
    pub date: String,
    pub region: String,
    pub service: String,
}

impl Scope {
    /// Of nothing: for what is searched for.
    pub fn none() -> Self {
        Self { date: String::new(), region: String::new(), service: String::new() }
    }
}

/// What a value becomes before it is put in.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Form {
    /// The value as stored.
    Bare,
    /// `Basic base64(USER:VALUE)`; without a user the value is both, `USER:PASSWORD`.
    Basic { user: Option<String> },
    /// A scheme and what goes with it, as it was had.
    Authorization,
    /// The template with the value in place of `{}`.
    Template { template: String },
    /// Three parts: a key that signs for that day, region and service only; the access key's id;
    /// the session token, which may be empty.
    SigV4(Scope),
    /// These fields of what a server has made, in that form.
    Fields { named: Vec<String>, form: Box<Form> },
    /// What the key can sign with, two bytes each; then the certificate and its chain, DER. None
    /// of it is secret.
    Certificate,
}

/// What the network's worker is asked: one request. Parts: the value of each secret header, in
/// their order, and the body.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fetch {
    /// `GET` or `POST`.
    pub method: String,
    /// `https://…`.
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// Names of headers whose values are secret.
    pub secret_headers: Vec<String>,
}

/// What the network's worker is asked: how a registry wants its logins, and a token of the server
/// that it names, if the password may go there. Part: the password, as Basic.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exchange {
    /// `https://HOST/v2/`.
    pub url: String,
    /// Patterns of the hosts that may be shown the password.
    pub hosts: Vec<String>,
    pub account: String,
    pub scope: Option<String>,
}

/// What the network's worker is asked: the keys of this host's own role, of the metadata service of
/// an instance.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Instance {
    pub url: String,
    /// Of the roles that it lists the first, where none is named.
    pub role: Option<String>,
}

/// What the commands' worker is asked. Part: what the command reads.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    pub command: String,
}

/// What came of it.
#[derive(Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fetched {
    /// Part: the body, or what a command wrote; its status is 0.
    Answered { status: u16 },
    /// Nobody answered, for this reason.
    Failed { reason: String },
}

/// What the child answers.
#[derive(Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// The first frame, unasked: the vault is open.
    Open {
        pid: u32,
        key_source: String,
        authorities: Vec<Public>,
        notes: Vec<String>,
    },
    Done,
    Sealed {
        rows: u64,
    },
    Rendered {
        /// How many parts are to be put in; the needles follow.
        values: usize,
        /// Tells tokens of one credential apart.
        serial: u64,
        /// How long it may be used, where that is known.
        good_ms: Option<u64>,
    },
    /// The issuing one first.
    Authorities {
        authorities: Vec<Public>,
    },
    Masked {
        /// How many values were.
        found: u64,
    },
    Leaf {
        /// The certificate's end, in seconds since 1970.
        not_after: u64,
    },
    Text {
        text: String,
    },
    Secrets {
        secrets: Vec<SecretInfo>,
    },
    Failed {
        why: Why,
        text: String,
    },
}

/// The kinds of failure; see [`VaultError`].
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    Missing,
    Refused,
    Invalid,
    Failed,
    Key,
    NeedsLogin,
    Unavailable,
}

impl VaultError {
    pub(super) fn from_wire(why: Why, text: String) -> Self {
        match why {
            Why::Missing => Self::Missing(text),
            Why::Refused => Self::Refused(text),
            Why::Invalid => Self::Invalid(text),
            Why::Failed => Self::Failed(text),
            Why::Key => Self::Key(text),
            Why::NeedsLogin => Self::NeedsLogin(text),
            Why::Unavailable => Self::Unavailable(text),
        }
    }

    pub(super) fn to_wire(&self) -> Reply {
        let (why, text) = match self {
            Self::Missing(name) => (Why::Missing, name.clone()),
            Self::Refused(text) => (Why::Refused, text.clone()),
            Self::Invalid(text) => (Why::Invalid, text.clone()),
            Self::Failed(text) => (Why::Failed, text.clone()),
            Self::Key(text) => (Why::Key, text.clone()),
            Self::NeedsLogin(text) => (Why::NeedsLogin, text.clone()),
            Self::Unavailable(text) => (Why::Unavailable, text.clone()),
            Self::Gone => (Why::Failed, self.to_string()),
        };
        Reply::Failed { why, text }
    }
}

/// A frame that is not as described above.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a message between proxyd and its vault is malformed: {0}")]
pub struct Malformed(&'static str);

/// A whole frame, its length in front, wiped on drop.
pub fn encode(number: u32, head: &impl Serialize, parts: &[Secret]) -> Zeroizing<Vec<u8>> {
    let head = serde_json::to_vec(head).expect("heads hold nothing that JSON cannot");
    let parts_bytes: usize = parts.iter().map(|part| 4 + part.expose_secret().len()).sum();
    let body = 8 + head.len() + parts_bytes;
    let mut frame = Zeroizing::new(Vec::with_capacity(4 + body));
    put(&mut frame, body);
    frame.extend_from_slice(&number.to_le_bytes());
    put(&mut frame, head.len());
    frame.extend_from_slice(&head);
    for part in parts {
        put(&mut frame, part.expose_secret().len());
        frame.extend_from_slice(part.expose_secret());
    }
    frame
}

fn put(frame: &mut Vec<u8>, length: usize) {
    let length = u32::try_from(length).expect("secrets are bounded far below 4 GiB");
    frame.extend_from_slice(&length.to_le_bytes());
}

/// The length of a frame's body from its first four bytes.
pub fn body_length(prefix: [u8; 4]) -> Result<usize, Malformed> {
    match u32::from_le_bytes(prefix) as usize {
        length @ 8..=FRAME_BYTES_MAX => Ok(length),
        _ => Err(Malformed("its length")),
    }
}

/// The number of the question that a frame's body belongs to.
pub fn number(body: &[u8]) -> u32 {
    body.first_chunk().map_or(0, |number| u32::from_le_bytes(*number))
}

/// Splits a frame's body.
pub fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<(T, Vec<Secret>), Malformed> {
    let (_, mut rest) = body.split_at_checked(4).ok_or(Malformed("it is cut"))?;
    let head = take(&mut rest)?;
    let head = serde_json::from_slice(head).map_err(|_| Malformed("its head"))?;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        if parts.len() == PARTS_MAX {
            return Err(Malformed("its number of parts"));
        }
        parts.push(Secret::new(take(&mut rest)?.to_vec()));
    }
    Ok((head, parts))
}

fn take<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    let (length, after) = rest.split_first_chunk().ok_or(Malformed("it is cut"))?;
    let length = u32::from_le_bytes(*length) as usize;
    let (taken, after) = after.split_at_checked(length).ok_or(Malformed("it is cut"))?;
    *rest = after;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame() -> Vec<u8> {
        let parts = [Secret::new(b"one".to_vec()), Secret::new(Vec::new())];
        encode(7, &Request::Put { name: "github".into() }, &parts).to_vec()
    }

    #[test]
    fn a_frame_comes_back_as_it_went() {
        let frame = frame();

        let length = body_length(frame[..4].try_into().unwrap()).unwrap();
        let (head, parts) = decode::<Request>(&frame[4..]).unwrap();

        assert_eq!(length, frame.len() - 4);
        assert_eq!(number(&frame[4..]), 7);
        assert!(matches!(head, Request::Put { name } if name == "github"));
        assert_eq!(parts.len(), 2);
        assert_eq!(parts[0].expose_secret(), b"one");
    }

    #[test]
    fn no_cut_or_changed_frame_is_taken_or_panics() {
        let frame = frame();
        for cut in 4..frame.len() {
            // Cut right after a whole part, a frame has only lost the parts that follow.
            let whole = decode::<Request>(&frame[4..cut]).map(|(_, parts)| parts.len());
            assert!(!matches!(whole, Ok(2)), "cut at {cut}");
        }
        for at in 4..frame.len() {
            for value in [0, 0x7f, 0xff] {
                let mut changed = frame.clone();
                changed[at] = value;
                let _ = decode::<Request>(&changed[4..]);
            }
        }
    }

    #[test]
    fn lengths_out_of_bounds_are_refused_before_any_room_is_made() {
        for length in [0u32, 7, (FRAME_BYTES_MAX + 1) as u32, u32::MAX] {
            assert!(body_length(length.to_le_bytes()).is_err(), "{length}");
        }
    }
}
