//! Names of users and groups, as this host's account database has them.

use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};

/// What an account is called and belongs to.
#[derive(Default)]
pub struct Account {
    pub user: Option<String>,
    pub gids: Vec<u32>,
    pub groups: Vec<String>,
}

/// Looks a user id up; an unknown one has no names.
pub fn account(uid: u32) -> Account {
    let Ok(Some(user)) = User::from_uid(Uid::from_raw(uid)) else { return Account::default() };
    let gids = CString::new(user.name.as_str())
        .ok()
        .and_then(|name| getgrouplist(&name, user.gid).ok())
        .unwrap_or_else(|| vec![user.gid]);
    let groups = gids.iter().filter_map(|gid| group(*gid)).collect();
    Account { user: Some(user.name), gids: gids.into_iter().map(Gid::as_raw).collect(), groups }
}

fn group(gid: Gid) -> Option<String> {
    Group::from_gid(gid).ok().flatten().map(|group| group.name)
}

/// A user's uid and gid.
pub fn named(name: &str) -> Result<(u32, u32), String> {
    match nix::unistd::User::from_name(name) {
        Ok(Some(user)) => Ok((user.uid.as_raw(), user.gid.as_raw())),
        Ok(None) => Err(format!("there is no user {name:?} on this host")),
        Err(errno) => Err(format!("cannot look up user {name:?}: {errno}")),
    }
}
