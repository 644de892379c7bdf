//! Files from which usual clients read their keys, and clouds whose metadata servers they ask: the
//! ways to a credential besides a variable.

/// A file in the home directory of a sandbox that holds placeholders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClientFile {
    Aws,
    Cargo,
    Docker,
    Gh,
    GitCredentials,
    Netrc,
    Npmrc,
    Pypirc,
}

/// By the path below the home directory, which is also how policies name it.
const PATHS: &[(&str, ClientFile)] = &[
    (".aws/credentials", ClientFile::Aws),
    (".cargo/credentials.toml", ClientFile::Cargo),
    (".config/gh/hosts.yml", ClientFile::Gh),
    (".docker/config.json", ClientFile::Docker),
    (".git-credentials", ClientFile::GitCredentials),
    (".netrc", ClientFile::Netrc),
    (".npmrc", ClientFile::Npmrc),
    (".pypirc", ClientFile::Pypirc),
];

impl ClientFile {
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix("~/").unwrap_or(text);
        PATHS.iter().find(|(path, _)| *path == text).map(|(_, file)| *file)
    }

    pub fn path(self) -> &'static str {
        let found = PATHS.iter().find(|(_, file)| *file == self);
        found.map_or("", |(path, _)| path)
    }

    /// Every path, for messages.
    pub fn paths() -> Vec<&'static str> {
        PATHS.iter().map(|(path, _)| *path).collect()
    }

    /// Whether its entries are for hosts, so that there is none without one.
    pub fn names_hosts(self) -> bool {
        !matches!(self, Self::Aws | Self::Cargo)
    }
}

/// A cloud whose metadata server programs ask for their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cloud {
    Aws,
    Gcp,
}

impl Cloud {
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "aws" => Some(Self::Aws),
            "gcp" => Some(Self::Gcp),
            _ => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Gcp => "gcp",
        }
    }

    /// Where its metadata server is asked.
    pub fn hosts(self) -> &'static [&'static str] {
        match self {
            Self::Aws => &["169.254.169.254", "169.254.170.2"],
            Self::Gcp => &["169.254.169.254", "metadata.google.internal"],
        }
    }
}

/// The port of every metadata server.
pub const METADATA_PORT: u16 = 80;
/// Variables whose placeholders AWS's clients need together.
pub const AWS_PAIR: [&str; 2] = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_known_by_its_path_below_the_home_directory() {
        for (path, file) in PATHS {
            assert_eq!(ClientFile::parse(path), Some(*file));
            assert_eq!(ClientFile::parse(&format!("~/{path}")), Some(*file));
            assert_eq!(file.path(), *path);
        }
        for unknown in ["", ".bashrc", "/etc/passwd", "../.netrc", ".netrc/", "~/"] {
            assert_eq!(ClientFile::parse(unknown), None, "{unknown}");
        }
    }
}
