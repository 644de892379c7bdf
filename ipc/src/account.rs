//! Users that a configuration file names.

use serde::{Deserialize, Deserializer, de};

/// The uid of a user that was named: configuration is the same on every host, uids are not.
///
/// An account that does not exist is an error of the file, so that a mistyped name trusts nobody.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedUser {
    pub uid: u32,
}

impl<'de> Deserialize<'de> for NamedUser {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        match nix::unistd::User::from_name(&name) {
            Ok(Some(user)) => Ok(Self { uid: user.uid.as_raw() }),
            Ok(None) => Err(de::Error::custom(format!("there is no user {name:?} on this host"))),
            Err(errno) => Err(de::Error::custom(format!("cannot look up user {name:?}: {errno}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_known_by_name_and_an_unknown_one_is_an_error() {
        let root: NamedUser = serde_json::from_str("\"root\"").unwrap();
        let nobody = serde_json::from_str::<NamedUser>("\"no-such-user-here\"");

        assert_eq!(root.uid, 0);
        assert!(nobody.unwrap_err().to_string().contains("no-such-user-here"));
        assert!(serde_json::from_str::<NamedUser>("7").is_err());
    }
}
