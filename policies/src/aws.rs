//! Where a value is at AWS Secrets Manager: `agents/github?stage=AWSPREVIOUS#token`.

/// A secret by its name or ARN, which version of it, and which field of its JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AwsEntry<'a> {
    pub id: &'a str,
    /// The current one where none is named.
    pub version: Option<AwsVersion<'a>>,
    /// The whole value where none is named.
    pub field: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwsVersion<'a> {
    Stage(&'a str),
    Id(&'a str),
}

impl<'a> AwsEntry<'a> {
    pub fn parse(text: &'a str) -> Option<Self> {
        let (place, field) = match text.split_once('#') {
            Some((place, field)) => (place, Some(field)),
            None => (text, None),
        };
        let (id, version) = match place.split_once('?') {
            None => (place, None),
            Some((id, asked)) => match asked.split_once('=')? {
                ("stage", stage) => (id, Some(AwsVersion::Stage(stage))),
                ("version", version) => (id, Some(AwsVersion::Id(version))),
                _ => return None,
            },
        };
        let arn = id.starts_with("arn:");
        let legal =
            |b: u8| b.is_ascii_alphanumeric() || b"/_+=.@-".contains(&b) || (arn && b == b':');
        let named = match version {
            None => true,
            Some(AwsVersion::Stage(text) | AwsVersion::Id(text)) => {
                let legal = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
                (1..=256).contains(&text.len()) && text.bytes().all(legal)
            }
        };
        let field_sound = field
            .is_none_or(|field| !field.is_empty() && field.bytes().all(|b| b.is_ascii_graphic()));
        let sound = (1..=512).contains(&id.len())
            && id.bytes().all(legal)
            && named
            && field_sound
            && text.len() <= super::credential::PATH_BYTES_MAX;
        sound.then_some(Self { id, version, field })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_versions_and_fields_are_told_apart_and_odd_ones_refused() {
        let entry = |id, version, field| Some(AwsEntry { id, version, field });
        let previous = Some(AwsVersion::Stage("AWSPREVIOUS"));
        let arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:a/b-AbCdEf";
        for (text, expected) in [
            ("agents/github", entry("agents/github", None, None)),
            ("a@b+c=d#token", entry("a@b+c=d", None, Some("token"))),
            ("a?stage=AWSPREVIOUS#t", entry("a", previous, Some("t"))),
            ("a?version=1-2", entry("a", Some(AwsVersion::Id("1-2")), None)),
            (arn, entry(arn, None, None)),
            ("a:b", None),
            ("", None),
            ("#t", None),
            ("a#", None),
            ("a#two words", None),
            ("a?stage=", None),
            ("a?stage=x&y=z", None),
            ("a?odd=x", None),
            ("a?", None),
            ("a b", None),
            ("a%2fb", None),
            ("a\"b", None),
        ] {
            assert_eq!(AwsEntry::parse(text), expected, "{text}");
        }
    }
}
