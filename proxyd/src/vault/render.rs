//! A value in the form in which it goes into a request.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::VaultError;
use super::secret::Secret;
use super::wire::Form;

/// Where the value goes in a header template.
const SLOT: &str = "{}";

/// The value in that form. Header forms refuse values that no header can hold.
pub(super) fn render(value: &Secret, form: &Form) -> Result<Secret, VaultError> {
    match form {
        Form::Bare | Form::SigV4(_) => Ok(Secret::concat(&[value.expose_secret()])),
        Form::Basic { .. } => {
            let token = basic_token(value, form)?;
            Ok(Secret::concat(&[b"Basic ", token.expose_secret()]))
        }
        Form::Template { template } => {
            check_header(value)?;
            let (before, after) = template.split_once(SLOT).ok_or_else(|| {
                VaultError::Invalid(format!("header template {template:?} has no {SLOT}"))
            })?;
            Ok(Secret::concat(&[before.as_bytes(), value.expose_secret(), after.as_bytes()]))
        }
    }
}

/// `base64(USER:VALUE)` (RFC 7617); the value alone for other forms.
pub(super) fn basic_token(value: &Secret, form: &Form) -> Result<Secret, VaultError> {
    let Form::Basic { user } = form else {
        return Ok(Secret::concat(&[value.expose_secret()]));
    };
    if user.contains(':') {
        return Err(VaultError::Invalid("a user name cannot hold a colon (RFC 7617)".into()));
    }
    check_header(value)?;
    let pair = Secret::concat(&[user.as_bytes(), b":", value.expose_secret()]);
    let pair = pair.expose_secret();
    let mut token = Zeroizing::new(vec![0; pair.len().div_ceil(3) * 4]);
    STANDARD
        .encode_slice(pair, &mut token)
        .expect("four bytes for each begun group of three hold the base64");
    Ok(Secret::new(std::mem::take(&mut *token)))
}

/// RFC 9110, section 5.5: a line end in a value would begin a header of the value's choosing.
fn check_header(value: &Secret) -> Result<(), VaultError> {
    let illegal = |byte: &u8| (*byte < 0x20 && *byte != b'\t') || *byte == 0x7f;
    match value.expose_secret().iter().any(illegal) {
        true => Err(VaultError::Refused(
            "the secret's value holds control characters, which no header can carry".into(),
        )),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: &str, form: Form) -> Option<String> {
        let rendered = render(&Secret::new(value.as_bytes().to_vec()), &form).ok()?;
        Some(String::from_utf8(rendered.expose_secret().to_vec()).unwrap())
    }

    #[test]
    fn renders_each_form_and_refuses_what_a_header_cannot_hold() {
        let basic = |user: &str| Form::Basic { user: user.into() };
        let template = |text: &str| Form::Template { template: text.into() };
        for (value, form, expected) in [
            ("Aladdin", Form::Bare, Some("Aladdin")),
            ("two\nlines", Form::Bare, Some("two\nlines")),
            ("open sesame", basic("Aladdin"), Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")),
            ("open sesame", basic("a:b"), None),
            ("abc", template("Bearer {}"), Some("Bearer abc")),
            ("abc", template("token={};v=1"), Some("token=abc;v=1")),
            ("a{}c", template("Bearer {}"), Some("Bearer a{}c")),
            ("abc", template("no slot"), None),
            ("a\r\nX-Evil: 1", template("Bearer {}"), None),
            ("a\0b", basic("u"), None),
        ] {
            assert_eq!(shown(value, form).as_deref(), expected, "{value:?}");
        }
    }
}
