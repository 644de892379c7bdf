//! What to do about a daemon's socket that cannot be reached.
//!
//! Under systemd a socket is open to a group, and the file itself says which one; one person's
//! daemons serve that person alone.

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Group, Uid, User};

/// The daemons' own group. Nobody else is advised to join it.
const DAEMONS: &str = "cleanhands-daemons";

/// What whoever got `why` from connecting to `socket`, which `daemon` serves, can do.
pub fn hint(socket: &Path, why: ErrorKind, daemon: &str) -> String {
    if why != ErrorKind::PermissionDenied {
        return format!("is {daemon} running? `cleanhands doctor` tells");
    }
    // Where the directory cannot be entered, the nearest one above that can be seen says whose.
    let seen = socket.ancestors().find_map(|at| Some((at, std::fs::metadata(at).ok()?)));
    match seen {
        Some((at, meta)) if at == socket && meta.mode() & 0o020 != 0 => for_group(meta.gid()),
        Some((at, meta)) => for_owner(at, meta.uid()),
        None => format!("run this as the user whose {daemon} it is"),
    }
}

fn for_group(gid: u32) -> String {
    let name = Group::from_gid(Gid::from_raw(gid)).ok().flatten().map(|group| group.name);
    match name.as_deref() {
        Some(DAEMONS) => "that is for the daemons and root: put sudo before it".to_owned(),
        Some(group) => format!(
            "that is for members of the group {group}: sudo usermod -aG {group} USER, \
             and log in again"
        ),
        None => format!("that is for members of the group with number {gid}"),
    }
}

fn for_owner(at: &Path, uid: u32) -> String {
    let name = User::from_uid(Uid::from_raw(uid)).ok().flatten().map(|user| user.name);
    let name = name.unwrap_or_else(|| format!("uid {uid}"));
    format!(
        "{} is {name}'s: run this as {name}, or name another installation with --runtime-dir",
        at.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn who_may_not_connect_is_told_of_the_group_or_the_owner_and_not_to_look_for_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("x.sock");
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // Not every group has a name.
        let gid = nix::unistd::getegid();
        let own = match Group::from_gid(gid).unwrap() {
            Some(group) => format!("usermod -aG {} ", group.name),
            None => format!("the group with number {gid}"),
        };
        let refused = |mode| {
            std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(mode)).unwrap();
            hint(&socket, ErrorKind::PermissionDenied, "proxyd")
        };

        let (group, owner) = (refused(0o660), refused(0o600));
        let absent = hint(&dir.path().join("none"), ErrorKind::NotFound, "proxyd");

        assert!(group.contains(&own), "{group}");
        assert!(owner.contains("--runtime-dir") && !owner.contains("usermod"), "{owner}");
        assert!(!group.contains("running") && !owner.contains("running"));
        assert!(absent.contains("is proxyd running?"), "{absent}");
    }
}
