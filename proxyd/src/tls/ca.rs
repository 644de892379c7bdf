//! The certificate authority: makes one, and issues leaf certificates from it.
//!
//! Runs in the vault child, the only process that has the key. The subject holds a piece of the
//! key's identifier, so that a rotated authority is another name and clients never mix the two up.

use std::time::Duration;

use policies::Host;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber, SubjectPublicKeyInfo,
};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};

use super::authority::{AuthorityId, Public};
use crate::vault::Secret;

/// Life of an authority. Its key never leaves the vault child; rotation does not wait for the end.
const CA_LIFE_SECONDS: u64 = 10 * 365 * DAY_SECONDS;
/// An authority with less left than this is followed by a new one. Leases keep the one that they
/// began with, so this is how long any lease may last at least.
const CA_MARGIN_SECONDS: u64 = 2 * 365 * DAY_SECONDS;
/// How far validity reaches back: a sandbox's clock may be behind ours.
const LEAF_BACK_SECONDS: u64 = DAY_SECONDS;
const CA_BACK_SECONDS: u64 = 2 * DAY_SECONDS;
const DAY_SECONDS: u64 = 24 * 3600;

/// An authority as it is kept. Times are seconds since 1970.
pub struct Kept {
    /// DER.
    pub certificate: Vec<u8>,
    /// PKCS #8, DER.
    pub key: Secret,
    pub not_before: u64,
    pub not_after: u64,
}

/// An authority that can issue.
pub struct Authority {
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    not_before: u64,
    not_after: u64,
}

/// Makes an authority.
pub fn make(now: u64) -> Result<Kept, String> {
    let key = KeyPair::generate().map_err(|error| cannot("make", &error))?;
    let id = hex::encode(&Sha256::digest(key.subject_public_key_info())[..4]);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Cleanhands");
    params.distinguished_name.push(DnType::CommonName, format!("Cleanhands CA {id}"));
    params.serial_number = Some(serial()?);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let not_before = now.saturating_sub(CA_BACK_SECONDS);
    let not_after = now.saturating_add(CA_LIFE_SECONDS);
    set_validity(&mut params, not_before, not_after);
    let certificate = params.self_signed(&key).map_err(|error| cannot("make", &error))?;
    Ok(Kept {
        certificate: certificate.der().to_vec(),
        key: Secret::new(key.serialize_der()),
        not_before,
        not_after,
    })
}

impl Authority {
    /// An authority from what [`make`] made.
    pub fn load(kept: Kept) -> Result<Self, String> {
        let Kept { certificate, key, not_before, not_after } = kept;
        let certificate = CertificateDer::from(certificate);
        let key = KeyPair::try_from(key.expose_secret()).map_err(|error| cannot("load", &error))?;
        let issuer =
            Issuer::from_ca_cert_der(&certificate, key).map_err(|error| cannot("load", &error))?;
        Ok(Self { certificate, issuer, not_before, not_after })
    }

    /// The certificate, PEM.
    pub fn pem(&self) -> String {
        let text = base64::Engine::encode(
            &base64::engine::general_purpose::STANDARD,
            self.certificate.as_ref(),
        );
        let mut pem = String::from("-----BEGIN CERTIFICATE-----\n");
        for line in text.as_bytes().chunks(64) {
            pem.extend(line.iter().map(|byte| char::from(*byte)));
            pem.push('\n');
        }
        pem.push_str("-----END CERTIFICATE-----\n");
        pem
    }

    /// DER.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    pub fn id(&self) -> AuthorityId {
        AuthorityId::of(&self.certificate)
    }

    pub fn public(&self) -> Public {
        Public {
            id: self.id(),
            pem: self.pem(),
            sha256: hex::encode(Sha256::digest(&self.certificate)),
            not_before: self.not_before,
            not_after: self.not_after,
        }
    }

    pub fn has_ended(&self, now: u64) -> bool {
        now >= self.not_after
    }

    /// Whether it is valid long enough to begin leases with.
    pub fn lasts(&self, now: u64) -> bool {
        now >= self.not_before && self.not_after.saturating_sub(now) > CA_MARGIN_SECONDS
    }

    /// When a leaf that is issued now ends: never later than the authority.
    pub fn leaf_end(&self, life_seconds: u64, now: u64) -> u64 {
        now.saturating_add(life_seconds).min(self.not_after)
    }

    /// Issues a leaf certificate, DER, for a server of that name or address with that public key.
    ///
    /// The subject is empty and the name stands in the alternative names alone, which are critical
    /// then (RFC 5280 section 4.2.1.6): a common name cannot hold more than 64 characters.
    pub fn issue(
        &self,
        host: &Host,
        spki: &[u8],
        life_seconds: u64,
        now: u64,
    ) -> Result<Vec<u8>, String> {
        let key = SubjectPublicKeyInfo::from_der(spki).map_err(|error| cannot("issue", &error))?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = vec![match host {
            Host::Ip(address) => SanType::IpAddress(*address),
            Host::Name(name) => {
                SanType::DnsName(name.as_str().try_into().map_err(|error| cannot("issue", &error))?)
            }
        }];
        params.serial_number = Some(serial()?);
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        set_validity(
            &mut params,
            now.saturating_sub(LEAF_BACK_SECONDS).max(self.not_before),
            self.leaf_end(life_seconds, now),
        );
        let leaf = params.signed_by(&key, &self.issuer).map_err(|error| cannot("issue", &error))?;
        Ok(leaf.der().to_vec())
    }
}

fn cannot(what: &str, error: &dyn std::fmt::Display) -> String {
    format!("cannot {what} a certificate: {error}")
}

/// 16 random bytes, positive (RFC 5280 section 4.1.2.2) and never with a zero in front.
fn serial() -> Result<SerialNumber, String> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| cannot("number", &error))?;
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn set_validity(params: &mut CertificateParams, not_before: u64, not_after: u64) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(not_before);
    params.not_after = epoch + Duration::from_secs(not_after);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Arc;

    const NOW: u64 = 1_790_000_000;

    fn authority(now: u64) -> Authority {
        Authority::load(make(now).unwrap()).unwrap()
    }

    fn leaf_key() -> Vec<u8> {
        KeyPair::generate().unwrap().subject_public_key_info()
    }

    /// Whether a client that trusts the authority takes the leaf for that host at that time.
    fn verifies(authority: &Authority, leaf: Vec<u8>, host: &str, time: u64) -> bool {
        use rustls::client::{WebPkiServerVerifier, danger::ServerCertVerifier};
        let mut roots = rustls::RootCertStore::empty();
        roots.add(authority.certificate.clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let name = host.to_owned().try_into().unwrap();
        let time = rustls_pki_types::UnixTime::since_unix_epoch(Duration::from_secs(time));
        let verifier = builder.build().unwrap();
        verifier.verify_server_cert(&leaf.into(), &[], &name, &[], time).is_ok()
    }

    // tests/peers/chains.py has the judgement of others, in their strictest settings.
    #[test]
    fn leaves_verify_for_the_name_or_address_they_were_issued_for_and_no_other() {
        let authority = authority(NOW);
        let long = format!("{0}.{0}.{0}.example", "a".repeat(63));
        let names = ["api.example", &long[..], "xn--bcher-kva.example", "127.0.0.1", "2001:db8::1"];
        for name in names {
            let host = Host::parse(name).unwrap();
            let leaf = authority.issue(&host, &leaf_key(), 3600, NOW).unwrap();
            for other in names {
                assert_eq!(
                    verifies(&authority, leaf.clone(), other, NOW),
                    name == other,
                    "{name} for {other}"
                );
            }
        }
    }

    #[test]
    fn leaves_verify_by_clocks_that_are_off_and_not_after_their_end() {
        let authority = authority(NOW);
        let host = Host::parse("api.example").unwrap();
        let leaf = authority.issue(&host, &leaf_key(), 3600, NOW).unwrap();
        for (time, expected) in [
            (NOW - 2 * DAY_SECONDS, false),
            (NOW - 59 * 60, true),
            (NOW - 5 * 60, true),
            (NOW + 5 * 60, true),
            (NOW + 3601, false),
        ] {
            assert_eq!(verifies(&authority, leaf.clone(), "api.example", time), expected, "{time}");
        }
    }

    #[test]
    fn serials_are_positive_short_and_unique() {
        let serials: HashSet<Vec<u8>> = (0..1000).map(|_| serial().unwrap().to_bytes()).collect();

        assert_eq!(serials.len(), 1000);
        assert!(
            serials.iter().all(|serial| serial.len() == 16 && (0x40..0x80).contains(&serial[0]))
        );
    }

    #[test]
    fn two_authorities_differ_in_name() {
        let name = |authority: &Authority| {
            let der = authority.certificate.to_vec();
            let at = der.windows(14).position(|w| w == b"Cleanhands CA ").unwrap();
            der[at..at + 22].to_vec()
        };

        assert_ne!(name(&authority(NOW)), name(&authority(NOW)));
    }

    #[test]
    fn an_authority_knows_its_time() {
        let authority = authority(NOW);
        for (then, ended, lasts) in [
            (NOW, false, true),
            (NOW - CA_BACK_SECONDS - 1, false, false),
            (NOW + CA_LIFE_SECONDS - CA_MARGIN_SECONDS - 1, false, true),
            (NOW + CA_LIFE_SECONDS - CA_MARGIN_SECONDS, false, false),
            (NOW + CA_LIFE_SECONDS - 1, false, false),
            (NOW + CA_LIFE_SECONDS, true, false),
        ] {
            assert_eq!((authority.has_ended(then), authority.lasts(then)), (ended, lasts));
        }
    }
}
