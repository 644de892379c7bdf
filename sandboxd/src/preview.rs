//! What would keep a sandbox of a policy from being made, told before one is.
//!
//! The same questions as when it is made ([`crate::plan`], [`crate::source`], the root), asked by
//! whoever checks a policy: some have the same answer on every host, others only this host can
//! tell, and only as far as the caller may look.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use policies::Policy;

use crate::apart::Apart;
use crate::init;
use crate::plan::{self, PlanFacts, SandboxPlan};
use crate::source::{self, Extent, Refusal};
use crate::sys::landlock;
use crate::templates::key;

/// One reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// Whether it is one on every host, and not on this one alone.
    pub everywhere: bool,
    pub text: String,
    pub hint: String,
}

/// All reasons that can be told now; `own` are the daemons' directories.
pub fn obstacles(policy: &Policy, own: Vec<PathBuf>) -> Vec<Obstacle> {
    let facts =
        PlanFacts { hostname: policy.name.clone(), ports: policy.ports().into_iter().collect() };
    let plan = match plan::plan(&policy.sandbox, &facts) {
        Ok(plan) => plan,
        Err(error) => {
            let hint = "no sandbox of this environment can be made; leases of it work".to_owned();
            return vec![Obstacle { everywhere: true, text: error.to_string(), hint }];
        }
    };
    let apart = Apart::new(own);
    let root = Some(&plan.root).filter(|root| *root != Path::new("/"));
    let root = root.and_then(|root| root_obstacle(root, &apart));
    let mounts = plan.mounts.iter().filter_map(|mount| {
        let what = format!("mount at {}", mount.target.display());
        directory(&what, &mount.source, &apart, Extent::Whole)
    });
    root.into_iter().chain(mounts).chain(kernel(&plan)).collect()
}

fn root_obstacle(root: &Path, apart: &Apart) -> Option<Obstacle> {
    directory("root", root, apart, Extent::Programs).or_else(|| {
        // What is in an image is known when it was unpacked.
        if key::is_layout(root) {
            return None;
        }
        let error = init::root::check_root(root).err()?;
        let hint = "name a directory with a whole system in it: usr, bin, lib".to_owned();
        Some(Obstacle { everywhere: false, text: format!("root {error}"), hint })
    })
}

fn directory(what: &str, path: &Path, apart: &Apart, extent: Extent) -> Option<Obstacle> {
    let (why, hint) = match source::open(path, apart, extent).err()? {
        refusal @ Refusal::Judged { .. } => {
            (refusal.to_string(), "name another directory, or move what keeps it from being shown")
        }
        Refusal::Io(error) => {
            let hint = match error.kind() {
                ErrorKind::NotFound => "make the directory, or name another",
                ErrorKind::PermissionDenied => {
                    "sandboxd may see more than you: check again as its user, or as root"
                }
                _ => "name a directory",
            };
            (format!("{}: {error}", path.display()), hint)
        }
    };
    let text = format!("{what}: {why}");
    Some(Obstacle { everywhere: false, text, hint: hint.to_owned() })
}

fn kernel(plan: &SandboxPlan) -> Option<Obstacle> {
    let (found, needed) = (landlock::abi(), plan.landlock_floor);
    (found < needed).then(|| Obstacle {
        everywhere: false,
        text: format!("landlock-floor is {needed}, and this kernel has Landlock ABI {found}"),
        hint: "a newer kernel, or a lower landlock-floor".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use policies::PolicySet;

    fn found(text: &str, own: &Path) -> Vec<Obstacle> {
        let set = PolicySet::parse(&[("dev.toml".to_owned(), text.to_owned())]).unwrap();
        obstacles(set.environment("dev").unwrap(), vec![own.to_owned()])
    }

    #[test]
    fn what_no_host_can_do_is_told_from_what_this_one_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        for name in ["state/inner", "data", "oci", "empty"] {
            std::fs::create_dir_all(top.join(name)).unwrap();
        }
        std::fs::write(top.join("oci/oci-layout"), "{}").unwrap();
        let mount = |source: &str| {
            format!("mounts = [{{ source = \"{}/{source}\", target = \"/x\" }}]", top.display())
        };
        let root = |name: &str| format!("root = \"{}/{name}\"", top.display());

        for (line, everywhere, part) in [
            ("limits = \"required\"\ndisk = \"1GiB\"".to_owned(), true, "limits"),
            (mount("none"), false, "No such file"),
            (mount("state/inner"), false, "belongs to the daemons"),
            (root("none"), false, "No such file"),
            (root("empty"), false, "none of the directories"),
            ("landlock-floor = 16".to_owned(), false, "landlock-floor is 16"),
        ] {
            let found = found(&format!("[sandbox]\n{line}\n"), &top.join("state"));

            assert_eq!(found.len(), 1, "{line}: {found:?}");
            assert_eq!(found[0].everywhere, everywhere, "{line}");
            assert!(found[0].text.contains(part), "{line}: {found:?}");
        }
        for line in [mount("data"), root("oci"), "packages = { pip = [\"x\"] }".to_owned()] {
            assert_eq!(found(&format!("[sandbox]\n{line}\n"), &top.join("state")), []);
        }
    }
}
