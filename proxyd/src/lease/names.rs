//! What one lease's sandbox was told: the addresses that stand for names inside, and the
//! certificate authority that its clients trust.
//!
//! A name keeps its addresses for as long as the lease lives, across restarts of proxyd: a
//! connection's destination is the only thing that says which name it is for, so an address is
//! never given to a second name. Bindings are appended to a small file before they are told, and so
//! is the authority.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use policies::Host;

use crate::tls::authority::AuthorityId;

/// Most names of one lease. A build that talks to more hosts than this has not been seen; a
/// process that makes names up ends here.
const NAMES_MAX: usize = 4096;
/// 198.18.0.0/15 is set aside for benchmarks (RFC 2544), so no real destination lies in it.
const V4_BASE: u32 = 0xC612_0000;
const V4_BITS: u32 = 15;

/// Begins the line of an authority; no name has a space.
const AUTHORITY: &str = "ca ";

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("the lease uses {NAMES_MAX} names already")]
    Full,
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
}

/// Why kept bindings cannot be taken up.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open {path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{path} belongs to another owner or environment")]
    Foreign { path: PathBuf },
    #[error("{path} is damaged in line {line}")]
    Damaged { path: PathBuf, line: usize },
}

/// The bindings of one lease.
pub struct Names {
    path: PathBuf,
    authority: OnceLock<AuthorityId>,
    bound: Mutex<Bound>,
}

struct Bound {
    file: File,
    by_name: HashMap<Host, u32>,
    by_index: Vec<Host>,
    /// The authority that was told last.
    trusted: Option<AuthorityId>,
}

/// Both addresses of one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub v4: Ipv4Addr,
    pub v6: Ipv6Addr,
}

impl Names {
    /// Opens the file at `path`; `stamp` says whose it is (owner and environment) and must be
    /// the one it was made with.
    pub fn open(path: &Path, stamp: &str) -> Result<Self, OpenError> {
        use std::os::unix::fs::OpenOptionsExt;
        let failed = |source| OpenError::File { path: path.to_owned(), source };
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(failed(error)),
        };
        let mut options = File::options();
        let mut file = options.create(true).append(true).mode(0o600).open(path).map_err(failed)?;
        let (complete, torn) = whole_lines(&text);
        let mut lines = complete.lines();
        match lines.next() {
            None => file.write_all(format!("{stamp}\n").as_bytes()).map_err(failed)?,
            Some(line) if line == stamp => {}
            Some(_) => return Err(OpenError::Foreign { path: path.to_owned() }),
        }
        if torn && !complete.is_empty() {
            // The line cut off by a power loss was never told to anybody.
            file.set_len(complete.len() as u64).map_err(failed)?;
        }
        let (by_name, by_index) = (HashMap::new(), Vec::new());
        let mut bound = Bound { file, by_name, by_index, trusted: None };
        for (number, line) in lines.enumerate() {
            if let Some(id) = authority(line) {
                bound.trusted = Some(id);
                continue;
            }
            let host = Host::parse(line).ok().filter(|host| host.name() == Some(line));
            let Some(host) = host else {
                return Err(OpenError::Damaged { path: path.to_owned(), line: number + 2 });
            };
            bound.add(host);
        }
        let (path, authority) = (path.to_owned(), OnceLock::new());
        Ok(Self { path, authority, bound: Mutex::new(bound) })
    }

    /// Settles which authority the lease is served by, given the one that its clients trust.
    pub fn settle(
        &self,
        choose: impl FnOnce(Option<AuthorityId>) -> AuthorityId,
    ) -> Result<(), OpenError> {
        let mut bound = self.bound.lock().expect("no holder of this lock panics");
        let chosen = choose(bound.trusted);
        if bound.trusted != Some(chosen) {
            let line = format!("{AUTHORITY}{chosen}\n");
            let failed = |source| OpenError::File { path: self.path.clone(), source };
            bound.file.write_all(line.as_bytes()).map_err(failed)?;
            bound.trusted = Some(chosen);
        }
        // Settled once, when the lease is entered.
        let _ = self.authority.set(chosen);
        Ok(())
    }

    /// The authority that its clients trust.
    pub fn authority(&self) -> AuthorityId {
        *self.authority.get().expect("settled before the lease is served")
    }

    /// The authority that the clients of a kept lease trust, by its file.
    pub fn trusted(path: &Path) -> Option<AuthorityId> {
        let text = std::fs::read_to_string(path).ok()?;
        whole_lines(&text).0.lines().filter_map(authority).next_back()
    }

    /// The addresses of a name, bound now if it has none yet.
    pub fn bind(&self, host: &Host) -> Result<Addresses, BindError> {
        let mut bound = self.bound.lock().expect("no holder of this lock panics");
        if let Some(index) = bound.by_name.get(host) {
            return Ok(addresses(*index));
        }
        if bound.by_index.len() >= NAMES_MAX {
            return Err(BindError::Full);
        }
        bound
            .file
            .write_all(format!("{host}\n").as_bytes())
            .map_err(|source| BindError::Write { path: self.path.clone(), source })?;
        Ok(addresses(bound.add(host.clone())))
    }

    /// What an address of a connection stands for.
    pub fn destination(&self, ip: IpAddr) -> Destination {
        let Some(index) = index(ip) else { return Destination::Literal(Host::from_ip(ip)) };
        let bound = self.bound.lock().expect("no holder of this lock panics");
        let known = usize::try_from(index).ok().and_then(|i| i.checked_sub(1));
        match known.and_then(|at| bound.by_index.get(at)) {
            Some(host) => Destination::Named(host.clone()),
            None => Destination::Unbound,
        }
    }

    /// Forgets every binding.
    pub fn remove(&self) {
        // A file that is gone already needs no removal; one that stays is swept at the next start.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Where a connection wants to go.
#[derive(Debug, PartialEq, Eq)]
pub enum Destination {
    Named(Host),
    /// An address that the sandbox did not get from us.
    Literal(Host),
    /// One of ours that stands for nothing.
    Unbound,
}

impl Bound {
    fn add(&mut self, host: Host) -> u32 {
        self.by_index.push(host.clone());
        let index = u32::try_from(self.by_index.len()).expect("NAMES_MAX fits");
        self.by_name.insert(host, index);
        index
    }
}

fn authority(line: &str) -> Option<AuthorityId> {
    AuthorityId::parse(line.strip_prefix(AUTHORITY)?)
}

fn whole_lines(text: &str) -> (&str, bool) {
    let end = text.rfind('\n').map_or(0, |at| at + 1);
    (&text[..end], end < text.len())
}

fn addresses(index: u32) -> Addresses {
    let v6 = Ipv6Addr::from((0xfd00_u128 << 112) | u128::from(index));
    Addresses { v4: Ipv4Addr::from(V4_BASE | index), v6 }
}

/// The number in a synthetic address; none for any other address.
fn index(ip: IpAddr) -> Option<u32> {
    match Host::from_ip(ip).ip() {
        Some(IpAddr::V4(v4)) => {
            let bits = u32::from(v4);
            (bits >> (32 - V4_BITS) == V4_BASE >> (32 - V4_BITS)).then_some(bits & 0x1_FFFF)
        }
        Some(IpAddr::V6(v6)) => {
            let bits = u128::from(v6);
            // fd00::/64; what does not fit the number stands for nothing.
            (bits >> 64 == 0xfd00_u128 << 48)
                .then(|| u32::try_from(bits & u128::from(u64::MAX)).unwrap_or(0))
        }
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Host {
        Host::parse(name).unwrap()
    }

    #[test]
    fn a_binding_survives_a_restart_and_is_never_given_to_another_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease_a");
        let names = Names::open(&path, "uid:0 dev").unwrap();
        let first = names.bind(&host("a.test")).unwrap();
        let second = names.bind(&host("b.test")).unwrap();
        drop(names);

        let again = Names::open(&path, "uid:0 dev").unwrap();

        assert_eq!(again.bind(&host("b.test")).unwrap(), second);
        assert_eq!(again.bind(&host("a.test")).unwrap(), first);
        let third = again.bind(&host("c.test")).unwrap();
        assert!(third != first && third != second);
        let named = Destination::Named(host("b.test"));
        assert_eq!(again.destination(second.v4.into()), named);
        assert_eq!(again.destination(second.v6.into()), named);
    }

    #[test]
    fn another_owner_cannot_take_bindings_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease_a");
        drop(Names::open(&path, "uid:0 dev").unwrap());

        let outcome = Names::open(&path, "uid:1 dev");

        assert!(matches!(outcome, Err(OpenError::Foreign { .. })));
    }

    #[test]
    fn a_torn_last_line_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease_a");
        std::fs::write(&path, "uid:0 dev\na.test\nb.te").unwrap();

        let names = Names::open(&path, "uid:0 dev").unwrap();
        names.bind(&host("c.test")).unwrap();

        assert_eq!(std::fs::read_to_string(&path).unwrap(), "uid:0 dev\na.test\nc.test\n");
    }

    #[test]
    fn the_authority_that_clients_trust_survives_a_restart_until_another_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lease_a");
        let [one, two] = [b"1", b"2"].map(|text| AuthorityId::of(text));
        let opened = |chosen| {
            let (names, mut before) = (Names::open(&path, "uid:0 dev").unwrap(), None);
            let choose = |trusted: Option<AuthorityId>| {
                before = trusted;
                chosen
            };
            names.settle(choose).unwrap();
            assert_eq!((names.authority(), Names::trusted(&path)), (chosen, Some(chosen)));
            names.bind(&host("a.test")).unwrap();
            before
        };

        assert_eq!(Names::trusted(&path), None);
        assert_eq!(opened(one), None);
        assert_eq!(opened(one), Some(one));
        let length = std::fs::metadata(&path).unwrap().len();
        assert_eq!(opened(one), Some(one));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length);
        assert_eq!(opened(two), Some(one));
        assert_eq!(opened(two), Some(two));
        // A line that was cut off was never told to anybody.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.find("ca ").unwrap() + 9]).unwrap();
        assert_eq!(opened(two), None);
    }

    #[test]
    fn other_addresses_are_literals_and_unknown_synthetic_ones_are_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let names = Names::open(&dir.path().join("l"), "x").unwrap();
        let literal = |text: &str| {
            names.destination(text.parse().unwrap()) == Destination::Literal(host(text))
        };
        let unbound = |text: &str| names.destination(text.parse().unwrap()) == Destination::Unbound;

        assert!(literal("93.184.216.34") && literal("198.20.0.1") && literal("fd00:ec2::254"));
        assert!(literal("198.17.255.255") && literal("2001:db8::1"));
        assert!(unbound("198.18.0.1") && unbound("198.19.255.255") && unbound("198.18.0.0"));
        assert!(unbound("fd00::1") && unbound("fd00::ffff:ffff:ffff:ffff"));
        assert!(unbound("::ffff:198.18.0.9"));
    }
}
