//! The certificate authorities, on both sides of the vault's socket.
//!
//! The newest issues for leases that begin now; a former one for the leases that began with it,
//! whose clients trust that one alone. Each change is one step of the store's: after a crash it
//! has been made or not.

use std::sync::Arc;

use policies::Host;

use super::store::Store;
use super::wire::{Reply, Request};
use super::{Secret, Vault, VaultError, lock, unexpected};
use crate::tls::authority::{AuthorityId, Public};
use crate::tls::ca::{self, Authority};

/// Most authorities at once: the one that issues and those whose leases have not ended.
pub const AUTHORITIES_MAX: usize = 4;
/// Longest life of a leaf certificate: what a stolen leaf key could be used for.
const LEAF_LIFE_SECONDS_MAX: u64 = 7 * 24 * 3600;

/// The child's, with their keys: the newest first, and never none.
pub(super) struct Authorities(Vec<Authority>);

impl Authorities {
    /// What the store holds; a new one when none will last.
    pub(super) fn open(store: &mut Store, now: u64) -> Result<Self, VaultError> {
        let kept = store.authorities()?.into_iter().map(Authority::load);
        let mut all = Self(kept.collect::<Result<_, _>>().map_err(VaultError::Failed)?);
        if !all.0.first().is_some_and(|newest| newest.lasts(now)) {
            all.make(store, now)?;
        }
        Ok(all)
    }

    fn make(&mut self, store: &mut Store, now: u64) -> Result<(), VaultError> {
        let kept = ca::make(now).map_err(VaultError::Failed)?;
        store.add_authority(&kept)?;
        self.0.insert(0, Authority::load(kept).map_err(VaultError::Failed)?);
        Ok(())
    }

    /// Retires the former ones that nobody uses, and makes the next one when that is wanted or due.
    ///
    /// The one that issued until now is retired by a later call at the earliest: whoever asks may
    /// have given it to somebody since it looked.
    pub(super) fn tend(
        &mut self,
        store: &mut Store,
        wanted: bool,
        used: &[AuthorityId],
        now: u64,
    ) -> Result<(), VaultError> {
        for at in (1..self.0.len()).rev() {
            if !used.contains(&self.0[at].id()) {
                store.remove_authority(self.0[at].certificate())?;
                self.0.remove(at);
            }
        }
        if !wanted && self.0[0].lasts(now) {
            return Ok(());
        }
        if self.0.len() >= AUTHORITIES_MAX {
            return Err(VaultError::Refused(format!(
                "open leases use all of {AUTHORITIES_MAX} certificate authorities: end the oldest \
                 leases first"
            )));
        }
        self.make(store, now)
    }

    /// Those that can issue.
    pub(super) fn public(&self, now: u64) -> Vec<Public> {
        let usable = |(at, authority): &(usize, &Authority)| *at == 0 || !authority.has_ended(now);
        self.0.iter().enumerate().filter(usable).map(|(_, authority)| authority.public()).collect()
    }

    /// Issues a leaf; its end and the certificate.
    pub(super) fn issue(
        &self,
        id: AuthorityId,
        host: &str,
        spki: &[u8],
        life_seconds: u64,
        now: u64,
    ) -> Result<(u64, Vec<u8>), VaultError> {
        let host =
            Host::parse(host).map_err(|error| VaultError::Invalid(format!("{host:?}: {error}")))?;
        let authority = self.0.iter().find(|authority| authority.id() == id);
        let Some(authority) = authority.filter(|authority| !authority.has_ended(now)) else {
            let text = format!("the certificate authority {id} has ended: open the lease again");
            return Err(VaultError::Refused(text));
        };
        let life = life_seconds.min(LEAF_LIFE_SECONDS_MAX);
        let leaf = authority.issue(&host, spki, life, now).map_err(VaultError::Failed)?;
        Ok((authority.leaf_end(life, now), leaf))
    }
}

impl Vault {
    /// The authorities, the issuing one first.
    pub fn authorities(&self) -> Arc<[Public]> {
        Arc::clone(&lock(&self.authorities))
    }

    /// Their certificates, PEM, in that order.
    pub fn ca_pem(&self) -> String {
        self.authorities().iter().map(|authority| authority.pem.as_str()).collect()
    }

    /// The authority for a lease: the one that its clients trust, while it is there, else the
    /// issuing one.
    pub fn authority_for(&self, trusted: Option<AuthorityId>) -> AuthorityId {
        let all = self.authorities();
        let kept = trusted.and_then(|id| all.iter().find(|authority| authority.id == id));
        kept.unwrap_or(&all[0]).id
    }

    /// One certificate, PEM; of one that is not there, all.
    pub fn pem_of(&self, id: AuthorityId) -> String {
        let all = self.authorities();
        let one = all.iter().find(|authority| authority.id == id);
        one.map_or_else(|| self.ca_pem(), |authority| authority.pem.clone())
    }

    /// Retires the former authorities that are not `used`, and makes the next one when that is
    /// wanted or due. One call at a time, so that the answers are taken in their order.
    pub async fn tend_authorities(
        &self,
        wanted: bool,
        used: Vec<AuthorityId>,
    ) -> Result<Arc<[Public]>, VaultError> {
        let request = Request::Authorities { wanted, used };
        match self.connection.ask(&request, &[]).await? {
            (Reply::Authorities { authorities }, _) if !authorities.is_empty() => {
                let all: Arc<[Public]> = authorities.into();
                *lock(&self.authorities) = Arc::clone(&all);
                Ok(all)
            }
            _ => Err(unexpected()),
        }
    }

    /// Has the child issue a leaf certificate for `host` over the public key `spki` (DER), valid
    /// for at most `life_seconds`. Returns DER and its end, in seconds since 1970.
    pub async fn issue_leaf(
        &self,
        authority: AuthorityId,
        host: &Host,
        spki: &[u8],
        life_seconds: u64,
    ) -> Result<(Vec<u8>, u64), VaultError> {
        let request = Request::Leaf { authority, host: host.to_string(), life_seconds };
        match self.connection.ask(&request, &[Secret::concat(&[spki])]).await? {
            (Reply::Leaf { not_after }, parts) if parts.len() == 1 => {
                Ok((parts[0].expose_secret().to_vec(), not_after))
            }
            _ => Err(unexpected()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use rcgen::PublicKeyData;

    use super::super::tests::in_process_by;
    use super::*;

    const DAY: u64 = 24 * 3600;

    #[tokio::test]
    async fn the_next_authority_is_made_years_ahead_and_the_former_issues_until_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let time = Arc::new(AtomicU64::new(super::super::child::now_unsigned()));
        let clock = Arc::clone(&time);
        let vault = in_process_by(dir.path(), move || clock.load(Ordering::SeqCst));
        let at = |seconds| time.store(seconds, Ordering::SeqCst);
        let spki = rcgen::KeyPair::generate().unwrap().subject_public_key_info();
        let host = Host::parse("api.example").unwrap();
        let issues = async |id| vault.issue_leaf(id, &host, &spki, DAY).await;
        let first = vault.authorities()[0].clone();

        at(first.not_after - 3 * 365 * DAY);
        let early = vault.tend_authorities(false, vec![]).await.unwrap();
        at(first.not_after - 365 * DAY - 1);
        let due = vault.tend_authorities(false, vec![]).await.unwrap();

        assert_eq!(&*early, std::slice::from_ref(&first));
        assert_eq!((due.len(), &due[1]), (2, &first));
        // Whoever was told of the first is served by it, and who comes now by the second.
        assert_eq!(vault.authority_for(Some(first.id)), first.id);
        assert_eq!(vault.authority_for(None), due[0].id);
        at(first.not_after - 1);
        assert_eq!(vault.tend_authorities(false, vec![first.id]).await.unwrap(), due);
        let (_, end) = issues(first.id).await.unwrap();
        assert_eq!(end, first.not_after);

        at(first.not_after);
        let ended = vault.tend_authorities(false, vec![first.id]).await.unwrap();
        assert_eq!(&*ended, &due[..1]);
        assert_eq!(vault.authority_for(Some(first.id)), due[0].id);
        let refused = issues(first.id).await.unwrap_err();
        assert!(refused.to_string().contains("open the lease again"), "{refused}");
        issues(due[0].id).await.unwrap();
    }

    #[tokio::test]
    async fn an_authority_is_retired_when_nobody_uses_it_and_never_with_the_word_that_follows_it() {
        let dir = tempfile::tempdir().unwrap();
        let vault = in_process_by(dir.path(), super::super::child::now_unsigned);
        let ids = |all: Arc<[Public]>| all.iter().map(|one| one.id).collect::<Vec<_>>();
        let first = vault.authorities()[0].id;

        let two = ids(vault.tend_authorities(true, vec![]).await.unwrap());
        assert_eq!((two.len(), two[1]), (2, first));
        let three = ids(vault.tend_authorities(true, vec![first]).await.unwrap());
        assert_eq!(three[1..], two);
        // Not in the order of their age: the middle one is used, the oldest is not.
        let left = ids(vault.tend_authorities(false, vec![two[0]]).await.unwrap());
        assert_eq!(left, [three[0], two[0]]);
        assert_eq!(ids(vault.tend_authorities(false, vec![]).await.unwrap()), [three[0]]);
    }
}
