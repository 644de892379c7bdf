//! Leaves under a clock that the test moves, issued by the vault child's own code.

use std::sync::Condvar;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{ServerName, UnixTime};

use super::*;
use crate::vault::tests::in_process_by;

const H2: &[&[u8]] = &[b"h2", b"http/1.1"];
const H1: &[&[u8]] = &[b"http/1.1"];
const DAY: u64 = 24 * 3600;

/// A vault and its leaves, the time that both see, and what the vault was asked for.
struct Rig {
    leaves: Leaves,
    seconds: Arc<AtomicU64>,
    issued: Arc<AtomicUsize>,
    /// What the vault does before it issues.
    mood: Arc<(Mutex<Mood>, Condvar)>,
    authority: AuthorityId,
    ca_pem: String,
    _dir: tempfile::TempDir,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Willing,
    /// It hangs until that changes.
    Slow,
    /// It ends.
    Ending,
}

impl Rig {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = Clock::system().now().as_secs();
        let seconds = Arc::new(AtomicU64::new(start));
        let issued = Arc::new(AtomicUsize::new(0));
        let mood = Arc::new((Mutex::new(Mood::Willing), Condvar::new()));
        let (time, count, own) = (seconds.clone(), issued.clone(), mood.clone());
        let vault = in_process_by(dir.path(), move || {
            count.fetch_add(1, Ordering::SeqCst);
            let slow = |mood: &mut Mood| *mood == Mood::Slow;
            let mood = own.1.wait_while(lock(&own.0), slow).unwrap();
            assert!(*mood != Mood::Ending, "this vault was told to end");
            time.load(Ordering::SeqCst)
        });
        let time = seconds.clone();
        let clock = Clock(Arc::new(move || Duration::from_secs(time.load(Ordering::SeqCst))));
        let (authority, ca_pem) = (vault.authority_for(None), vault.ca_pem());
        let leaves = Leaves::with_clock(vault, clock).unwrap();
        Self { leaves, seconds, issued, mood, authority, ca_pem, _dir: dir }
    }

    fn set(&self, seconds: u64) {
        self.seconds.store(seconds, Ordering::SeqCst);
    }

    fn vault(&self, mood: Mood) {
        *lock(&self.mood.0) = mood;
        self.mood.1.notify_all();
    }

    fn now(&self) -> u64 {
        self.seconds.load(Ordering::SeqCst)
    }

    fn issued(&self) -> usize {
        self.issued.load(Ordering::SeqCst)
    }

    async fn hit(&self, name: &str) -> Arc<ServerConfig> {
        self.leaves.server_config(self.authority, &host(name), H2).await.unwrap()
    }

    fn slot(&self, name: &str) -> Arc<Slot> {
        self.leaves.0.slot(self.authority, &host(name)).unwrap()
    }

    fn kept(&self, name: &str) -> Arc<Leaf> {
        let slot = self.slot(name);
        lock(&slot.leaf).clone().unwrap()
    }

    /// Whether the certificate that is served verifies at a time, as a client would have it.
    fn verifies(&self, name: &str, seconds: u64) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca_pem.as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(roots.into(), provider).build().unwrap();
        let server = ServerName::try_from(name.to_owned()).unwrap();
        let then = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let leaf = self.kept(name);
        verifier.verify_server_cert(&leaf.certified.cert[0], &[], &server, &[], then).is_ok()
    }

    async fn until(&self, what: &str, condition: impl Fn() -> bool) {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(std::time::Instant::now() < end, "not within the deadline: {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_connections_at_once_issue_one_certificate() {
    let rig = Rig::new();
    for round in 1..=2 {
        let hundred = (0..100).map(|_| {
            let (leaves, authority) = (rig.leaves.clone(), rig.authority);
            tokio::spawn(
                async move { leaves.server_config(authority, &host("a.example"), H2).await },
            )
        });
        let hundred: Vec<_> = hundred.collect();

        let mut configs = Vec::new();
        for task in hundred {
            configs.push(task.await.unwrap().unwrap());
        }

        assert!(configs.iter().all(|config| Arc::ptr_eq(config, &configs[0])));
        assert_eq!(rig.issued(), round);
        // And once more, when all of them find one that has ended.
        rig.set(rig.now() + 8 * DAY);
    }
}

#[tokio::test]
async fn each_list_of_protocols_has_a_configuration_and_all_of_a_host_take_its_tickets() {
    let rig = Rig::new();
    let both = rig.hit("a.example").await;
    let one = rig.leaves.server_config(rig.authority, &host("a.example"), H1).await.unwrap();
    let other = rig.hit("b.example").await;

    assert_eq!((both.alpn_protocols.len(), one.alpn_protocols.len()), (2, 1));
    let ticket = both.ticketer.encrypt(b"state").unwrap();
    assert_eq!(one.ticketer.decrypt(&ticket).as_deref(), Some(&b"state"[..]));
    assert_eq!(other.ticketer.decrypt(&ticket), None);
    assert_eq!(rig.issued(), 2);
}

#[tokio::test]
async fn a_leaf_from_the_cache_lasts_its_margin_wherever_the_clock_stands() {
    let rig = Rig::new();
    rig.hit("a.example").await;
    let first = rig.kept("a.example");
    let (issued, end) = (first.issued.as_secs(), first.not_after.as_secs());
    assert_eq!(end - issued, 7 * DAY);
    let margin = (end - issued) / u64::from(LATE_FRACTION);

    for then in [
        end - margin,
        end - margin + 1,
        end - 1,
        end,
        end + 1,
        end + DAY,
        end + 365 * DAY,
        issued,
        issued - DAY,
        issued - 300 * DAY,
    ] {
        // Each with the first leaf in its place, whatever the time before did.
        let slot = rig.slot("a.example");
        *lock(&slot.leaf) = Some(Arc::clone(&first));
        rig.set(then);

        rig.hit("a.example").await;

        let leaf = rig.kept("a.example");
        assert!(leaf.not_after.as_secs() >= then + margin, "{then}");
        // The CA itself is younger than the last of these.
        if then + DAY >= issued {
            assert!(rig.verifies("a.example", then), "{then}");
            assert!(rig.verifies("a.example", then + margin - 1), "{then}");
        }
    }
}

#[tokio::test]
async fn a_leaf_is_renewed_before_it_expires() {
    let rig = Rig::new();
    rig.hit("a.example").await;
    let first = rig.kept("a.example");
    rig.set(first.not_after.as_secs() - DAY + 1);

    // The vault hangs, and nobody waits for it.
    rig.vault(Mood::Slow);
    for _ in 0..10 {
        let config = tokio::time::timeout(Duration::from_secs(20), rig.hit("a.example"));
        config.await.expect("served from the cache");
    }
    assert!(Arc::ptr_eq(&rig.kept("a.example"), &first));
    rig.vault(Mood::Willing);
    rig.until("a new leaf", || !Arc::ptr_eq(&rig.kept("a.example"), &first)).await;

    assert_eq!(rig.issued(), 2);
    assert_eq!(rig.kept("a.example").not_after.as_secs(), rig.now() + 7 * DAY);
}

#[tokio::test]
async fn what_is_in_use_is_renewed_without_being_asked_for_and_the_rest_is_forgotten() {
    let rig = Rig::new();
    rig.hit("busy.example").await;
    rig.leaves.prefetch(rig.authority, &host("idle.example"));
    rig.until("both", || rig.issued() == 2).await;
    rig.until("kept", || {
        let slot = rig.slot("idle.example");
        lock(&slot.leaf).is_some()
    })
    .await;
    rig.set(rig.kept("busy.example").not_after.as_secs() - DAY + 1);

    rig.leaves.look().await;

    assert_eq!(rig.kept("busy.example").issued.as_secs(), rig.now());
    assert_eq!(rig.issued(), 3);
    let all = rig.leaves.0.hosts();
    let hosts = &all[&rig.authority];
    assert!(!hosts.slots.contains_key(&host("idle.example")));
    assert_eq!(hosts.order.len(), hosts.slots.len());
}

#[tokio::test]
async fn a_prefetched_leaf_is_there_for_its_first_client() {
    let rig = Rig::new();
    for _ in 0..10 {
        rig.leaves.prefetch(rig.authority, &host("a.example"));
    }

    rig.hit("a.example").await;

    assert_eq!(rig.issued(), 1);
}

#[tokio::test]
async fn a_vault_that_fails_leaves_the_kept_leaf_in_use_until_its_end() {
    let rig = Rig::new();
    rig.hit("a.example").await;
    let end = rig.kept("a.example").not_after.as_secs();
    rig.vault(Mood::Ending);

    for (then, served) in [(end - 1, true), (end, false)] {
        rig.set(then);
        let outcome = rig.leaves.server_config(rig.authority, &host("a.example"), H2).await;
        assert_eq!(outcome.is_ok(), served, "{then}");
    }
    assert!(rig.leaves.server_config(rig.authority, &host("b.example"), H2).await.is_err());
}

#[tokio::test]
async fn the_cache_is_bounded_and_keeps_what_is_used() {
    let rig = Rig::new();
    let busy = rig.hit("busy.example").await;
    for i in 0..3 * HOSTS_MAX {
        rig.slot(&format!("n{i}.example"));
        rig.slot("busy.example");
    }

    let again = rig.hit("busy.example").await;

    assert!(Arc::ptr_eq(&busy, &again));
    let all = rig.leaves.0.hosts();
    let hosts = &all[&rig.authority];
    assert_eq!((hosts.slots.len(), hosts.order.len()), (HOSTS_MAX, HOSTS_MAX));
}
