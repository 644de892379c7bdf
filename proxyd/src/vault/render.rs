//! A value in the form in which it goes into a request.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ipc::vault::SECRET_BYTES_MIN;
use policies::Inject;
use zeroize::Zeroizing;

use super::child::Answer;
use super::remote::lease;
use super::secret::Secret;
use super::wire::{Form, Reply, Scope};
use super::{VaultError, certificate, registry, sigv4};
use crate::scrub::forms_behind;

/// Where the value goes in a header template.
const SLOT: &str = "{}";

/// The value in that form. Header forms refuse values that no header can hold.
pub(super) fn render(value: &Secret, form: &Form) -> Result<Secret, VaultError> {
    match form {
        Form::Authorization => {
            check_header(value)?;
            Ok(Secret::concat(&[value.expose_secret()]))
        }
        Form::Certificate => {
            Err(VaultError::Refused("a certificate's key goes into no request".into()))
        }
        Form::Fields { named, form } => render(&lease::value(value, named)?, form),
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

/// `base64(USER:VALUE)` (RFC 7617), or of a value that is both; the value alone for other forms.
pub(super) fn basic_token(value: &Secret, form: &Form) -> Result<Secret, VaultError> {
    let Form::Basic { user } = form else {
        return Ok(Secret::concat(&[value.expose_secret()]));
    };
    if user.as_ref().is_some_and(|user| user.contains(':')) {
        return Err(VaultError::Invalid("a user name cannot hold a colon (RFC 7617)".into()));
    }
    check_header(value)?;
    let pair = match user {
        Some(user) => Secret::concat(&[user.as_bytes(), b":", value.expose_secret()]),
        None => {
            password(value)?;
            Secret::concat(&[value.expose_secret()])
        }
    };
    let pair = pair.expose_secret();
    let mut token = Zeroizing::new(vec![0; pair.len().div_ceil(3) * 4]);
    STANDARD
        .encode_slice(pair, &mut token)
        .expect("four bytes for each begun group of three hold the base64");
    Ok(Secret::new(std::mem::take(&mut *token)))
}

/// What stands behind the user in a value that is both.
fn password(value: &Secret) -> Result<&[u8], VaultError> {
    let text = value.expose_secret();
    let at = text.iter().position(|byte| *byte == b':');
    let password = at.map(|at| &text[at + 1..]).unwrap_or_default();
    match password.len() < SECRET_BYTES_MIN {
        true => Err(VaultError::Refused(format!(
            "its value is no USER:PASSWORD with at least {SECRET_BYTES_MIN} bytes of password"
        ))),
        false => Ok(password),
    }
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

/// The form in which a credential goes into a request.
pub(super) fn form(inject: &Inject, scope: Option<Scope>) -> Result<Form, VaultError> {
    Ok(match inject {
        Inject::Bearer => Form::Template { template: "Bearer {}".into() },
        Inject::Basic { user } => Form::Basic { user: user.clone() },
        Inject::Header { template, .. } => Form::Template { template: template.clone() },
        Inject::Registry { .. } => Form::Authorization,
        Inject::Query { .. } | Inject::Placeholder { .. } => Form::Bare,
        Inject::AwsSigV4 { regions, services } => match scope {
            Some(scope) if scope == Scope::none() => Form::SigV4(scope),
            Some(scope)
                if regions.contains(&scope.region)
                    && services.contains(&scope.service)
                    && is_near(&scope.date) =>
            {
                Form::SigV4(scope)
            }
            _ => return Err(VaultError::Refused("it signs nothing of that scope".into())),
        },
        Inject::ClientCertificate => Form::Certificate,
    })
}

/// Whether a scope's day is today, or begins or ended a moment ago: a key for a day to come would
/// outlast what it was asked for.
fn is_near(date: &str) -> bool {
    let now = jiff::Timestamp::now();
    let around = [-600, 0, 600].map(|seconds| now + jiff::SignedDuration::from_secs(seconds));
    let day =
        |at: jiff::Timestamp| at.to_zoned(jiff::tz::TimeZone::UTC).strftime("%Y%m%d").to_string();
    around.map(day).iter().any(|day| day == date)
}

/// The first value in that form, and what finds any of them.
pub(super) fn rendered<'a>(
    values: impl IntoIterator<Item = &'a Secret>,
    form: &Form,
    serial: u64,
    good_ms: Option<u64>,
) -> Answer {
    let mut parts = Vec::new();
    let mut count = 0;
    for value in values {
        if parts.is_empty() {
            parts = put_in(value, form)?;
            count = parts.len();
            add_needles(&mut parts, value, form)?;
        } else {
            // A former value that does not fit its use was never sent.
            let _ = add_needles(&mut parts, value, form);
        }
    }
    Ok((Reply::Rendered { values: count, serial, good_ms }, parts))
}

/// What goes into the request.
fn put_in(value: &Secret, form: &Form) -> Result<Vec<Secret>, VaultError> {
    if *form == Form::Certificate {
        return certificate::shown(value);
    }
    if let Form::Fields { named, form } = form {
        return put_in(&lease::value(value, named)?, form);
    }
    let Form::SigV4(Scope { date, region, service }) = form else {
        return Ok(vec![render(value, form)?]);
    };
    let key = sigv4::parse(value)?;
    Ok(vec![
        sigv4::signing_key(key.secret, date, region, service),
        Secret::concat(&[key.id]),
        Secret::concat(&[key.session]),
    ])
}

/// Every form of what an answer may hold of the value.
pub(super) fn add_needles(
    needles: &mut Vec<Secret>,
    value: &Secret,
    form: &Form,
) -> Result<(), VaultError> {
    for Sent { text, before } in texts(value, form)? {
        needles.extend(forms_behind(before, text.expose_secret()));
    }
    Ok(())
}

/// A part of a value, or the whole, as it stands in a request.
pub(super) struct Sent {
    pub text: Secret,
    /// The byte that stands before it, where there is one that is always the same.
    before: Option<u8>,
}

/// What a request in that form holds of the value: itself, and the rendered text where it is not
/// plain in that.
pub(super) fn texts(value: &Secret, form: &Form) -> Result<Vec<Sent>, VaultError> {
    let plain = |text: &[u8], before| Sent { text: Secret::concat(&[text]), before };
    // Between the name of a field and its value, and between a scheme and what goes with it.
    let blank = Some(b' ');
    Ok(match form {
        // The key is in no request and no handshake, so no answer can hold it: it stays here.
        Form::Certificate => Vec::new(),
        Form::Fields { named, form } => texts(&lease::value(value, named)?, form)?,
        Form::SigV4(_) => {
            // The secret key is in no request, so no answer can hold it: it stays here.
            let session = sigv4::parse(value)?.session;
            let session = Some(session).filter(|session| !session.is_empty());
            session.map(|session| plain(session, blank)).into_iter().collect()
        }
        Form::Authorization => {
            let parts = registry::parts(value).into_iter();
            parts.map(|text| Sent { text, before: blank }).collect()
        }
        Form::Bare => vec![plain(value.expose_secret(), None)],
        Form::Template { template } => {
            let before = template.split(SLOT).next().and_then(|text| text.bytes().last());
            vec![plain(value.expose_secret(), before.or(blank))]
        }
        Form::Basic { user } => {
            let token = basic_token(value, form)?;
            let password = if user.is_some() { value.expose_secret() } else { password(value)? };
            // Encoded again it may have lost its padding first, and another's words may follow.
            let text = token.expose_secret();
            let end = text.iter().rposition(|byte| *byte != b'=').map_or(0, |last| last + 1);
            vec![plain(password, Some(b':')), plain(&text[..end], blank)]
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(value: &str, form: Form) -> Option<String> {
        let rendered = render(&Secret::new(value.as_bytes().to_vec()), &form).ok()?;
        Some(String::from_utf8(rendered.expose_secret().to_vec()).unwrap())
    }

    #[test]
    fn a_basic_header_is_found_also_where_it_was_encoded_again() {
        use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE};
        let value = Secret::new(b"open sesame".to_vec());
        let form = Form::Basic { user: Some("Aladdin".into()) };
        let mut needles = Vec::new();
        add_needles(&mut needles, &value, &form).unwrap();
        let header = render(&value, &form).unwrap();
        let header = header.expose_secret();
        let hex: String = header.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut base32 = String::new();
        for group in header.chunks(5) {
            let bits = group.iter().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
            let bits = bits << (8 * (5 - group.len()));
            let digit = |at: usize| b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[bits as usize >> at & 31];
            base32.extend((0..8).rev().map(|number| char::from(digit(5 * number))));
        }

        for encoded in [
            String::from_utf8(header.to_vec()).unwrap(),
            hex,
            base32,
            STANDARD.encode(header),
            STANDARD.encode(&header[1..]),
            STANDARD.encode([header, b" and more"].concat()),
            STANDARD_NO_PAD.encode(&header[2..header.len() - 1]),
            URL_SAFE.encode(header),
        ] {
            let mut long = needles.iter().map(Secret::expose_secret).filter(|n| n.len() >= 24);
            let found = long.any(|n| memchr::memmem::find(encoded.as_bytes(), n).is_some());
            assert!(found, "{encoded}");
        }
    }

    #[test]
    fn renders_each_form_and_refuses_what_a_header_cannot_hold() {
        let basic = |user: &str| Form::Basic { user: Some(user.into()) };
        let pair = || Form::Basic { user: None };
        let template = |text: &str| Form::Template { template: text.into() };
        for (value, form, expected) in [
            ("Aladdin", Form::Bare, Some("Aladdin")),
            ("two\nlines", Form::Bare, Some("two\nlines")),
            ("open sesame", basic("Aladdin"), Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")),
            ("open sesame", basic("a:b"), None),
            ("Aladdin:open sesame", pair(), Some("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==")),
            ("open sesame", pair(), None),
            ("Aladdin:sesame", pair(), None),
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
