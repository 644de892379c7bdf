//! Certificates out of a PEM bundle (RFC 7468), as the root's distribution or an image has it, and
//! back.
//!
//! What is no certificate between its two lines is left out: one entry that cannot be read must not
//! cost a runtime all the others, and nobody is trusted for it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
const END: &str = "-----END CERTIFICATE-----";

/// Every certificate of a bundle, in DER, in its order.
pub fn certificates(pem: &[u8]) -> Vec<Vec<u8>> {
    // Comments between the entries may be in any encoding.
    let text = String::from_utf8_lossy(pem);
    let mut found = Vec::new();
    let mut rest = text.as_ref();
    while let Some((_, after)) = rest.split_once(BEGIN) {
        let Some((body, next)) = after.split_once(END) else { break };
        // An entry that was cut off must not swallow the one after it.
        let body = body.rsplit_once(BEGIN).map_or(body, |(_, last)| last);
        let digits: String = body.split_whitespace().collect();
        if let Ok(der) = STANDARD.decode(digits)
            && is_whole(&der)
        {
            found.push(der);
        }
        rest = next;
    }
    found
}

/// One certificate as an entry of a bundle.
pub fn entry(der: &[u8]) -> String {
    const LINE: usize = 64;
    let digits = STANDARD.encode(der);
    let lines: Vec<&str> = (0..digits.len())
        .step_by(LINE)
        .map(|from| &digits[from..digits.len().min(from + LINE)])
        .collect();
    format!("{BEGIN}\n{}\n{END}\n", lines.join("\n"))
}

/// Whether this is one DER sequence that ends where it says (X.690, 8.1.3).
fn is_whole(der: &[u8]) -> bool {
    const SEQUENCE: u8 = 0x30;
    let [SEQUENCE, first, rest @ ..] = der else { return false };
    if *first < 0x80 {
        return rest.len() == usize::from(*first);
    }
    let count = usize::from(*first & 0x7f);
    if !(1..=4).contains(&count) || rest.len() < count {
        return false;
    }
    let (length, content) = rest.split_at(count);
    let length = length.iter().fold(0usize, |sum, byte| sum << 8 | usize::from(*byte));
    content.len() == length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_certificate_is_found_whatever_stands_between_them() {
        let long: Vec<u8> = [0x30, 0x82, 0x01, 0x00].into_iter().chain([7; 256]).collect();
        let mut pem = b"# caf\xe9\n".to_vec();
        pem.extend(entry(&[0x30, 1, 9]).into_bytes());
        pem.extend(
            b"-----BEGIN TRUSTED CERTIFICATE-----\nAAAA\n-----END TRUSTED CERTIFICATE-----\n",
        );
        pem.extend(entry(&long).replace('\n', "\r\n").into_bytes());

        assert_eq!(certificates(&pem), [vec![0x30, 1, 9], long]);
    }

    #[test]
    fn an_entry_that_cannot_be_read_costs_no_other() {
        let good = entry(&[0x30, 1, 9]);
        for broken in [
            entry(b"no sequence"),
            entry(&[0x30, 5, 9]),
            entry(&[0x30, 0x84, 0xff, 0xff, 0xff, 0xff]),
            entry(&[0x30]),
            entry(&[]),
            format!("{BEGIN}\n!!!\n{END}\n"),
            format!("{BEGIN}\nMAEJ\n"),
        ] {
            assert_eq!(certificates(format!("{broken}{good}").as_bytes()), [[0x30, 1, 9]]);
        }
        assert!(certificates(format!("{BEGIN}\nMAEJ\n").as_bytes()).is_empty());
    }
}
