//! Who may act on what whose: the rule of every socket of this daemon.

use std::collections::BTreeSet;

use ipc::peer::Principal;

/// Those who may speak for any owner.
#[derive(Clone, Debug)]
pub struct Owners {
    trusted_uids: BTreeSet<u32>,
}

impl Owners {
    /// `configured`, and always root and `own`, the uid of this daemon.
    pub fn new(configured: &BTreeSet<u32>, own: u32) -> Self {
        let trusted_uids = configured.iter().copied().chain([0, own]).collect();
        Self { trusted_uids }
    }

    /// Whether `peer` may act on what `owner` owns.
    pub fn speaks_for(&self, peer: &Principal, owner: &str) -> bool {
        self.trusted_uids.contains(&peer.uid) || peer.owner() == owner
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_trusted_speak_for_others() {
        let owners = Owners::new(&BTreeSet::from([30]), 20);
        let table = [
            (0, "uid:1000", true),
            (20, "uid:1000", true),
            (30, "uid:1000", true),
            (1000, "uid:1000", true),
            (1001, "uid:1000", false),
            (100, "uid:1000", false),
            (1000, "", false),
            (1000, "uid:0", false),
        ];
        for (uid, owner, expected) in table {
            let peer = Principal { uid, gid: uid, pid: 1 };

            assert_eq!(owners.speaks_for(&peer, owner), expected, "{uid} for {owner:?}");
        }
    }
}
