//! `cleanhands policy diff`: two directories of policies, compared by what they would do.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;

use policies::PolicySet;
use policies::explain::effect::{Change, Effect, compare};
use serde_json::json;

use super::load;
use crate::args::Global;
use crate::failure::{Failure, OTHERWISE};
use crate::term::{self, Style};

pub fn run(global: &Global, before: &Path, after: &Path) -> Result<ExitCode, Failure> {
    let (before, after) = (load(before)?, load(after)?);
    let names: BTreeSet<&str> = before.names().chain(after.names()).collect();
    let style = Style::of_stdout();
    let mut same = true;
    for name in names {
        let (settings, changes) = of(name, &before, &after)?;
        same &= settings.is_empty() && changes.is_empty();
        for setting in settings {
            match global.json {
                true => term::json_line(&json!({ "environment": name, "setting": setting }))?,
                false => term::line(&format!("{name}: {setting}"))?,
            }
        }
        for (who, change) in changes {
            if global.json {
                term::json_line(&as_json(name, who, &change))?;
            } else {
                term::line(&line(style, name, who, &change))?;
            }
        }
    }
    if same && !global.json {
        term::line("no difference in effect")?;
    }
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(OTHERWISE) })
}

type Changes = Vec<(&'static str, Change)>;

/// What is set otherwise, and what would become otherwise of requests of sandboxes and of
/// harnessd's calls of MCP servers.
fn of(
    name: &str,
    before: &PolicySet,
    after: &PolicySet,
) -> Result<(Vec<String>, Changes), Failure> {
    let both = [before.environment(name), after.environment(name)];
    let mut settings = Vec::new();
    match both {
        [Some(old), Some(new)] => {
            if old.sandbox != new.sandbox {
                settings.push("[sandbox] is another one".to_owned());
            }
            if old.access != new.access {
                settings.push("[access] is another one".to_owned());
            }
        }
        [None, _] => settings.push("the environment is new".to_owned()),
        [_, None] => settings.push("the environment is gone".to_owned()),
    }
    let mcp = both.map(|policy| policy.map(|policy| policy.for_mcp()));
    let sides =
        [("", both.map(|p| p.map(|p| &**p))), ("mcp: ", [mcp[0].as_ref(), mcp[1].as_ref()])];
    let mut changes = Vec::new();
    for (who, [old, new]) in sides {
        let found = compare(old, new)
            .map_err(|why| Failure::new(format!("environment \"{name}\": {why}")))?;
        changes.extend(found.into_iter().map(|change| (who, change)));
    }
    Ok((settings, changes))
}

fn line(style: Style, name: &str, who: &str, change: &Change) -> String {
    let mark = match (change.before.is_allowed(), change.after.is_allowed()) {
        (false, true) => style.bad("+"),
        (true, false) => style.good("-"),
        _ => style.warn("~"),
    };
    format!("{mark} {name}: {who}{}", term::printable(&change.to_string()))
}

fn as_json(name: &str, who: &str, change: &Change) -> serde_json::Value {
    let effect = |effect: &Effect| effect.to_string();
    json!({
        "environment": name, "mcp": !who.is_empty(), "place": change.place.trim(),
        "methods": change.methods, "before": effect(&change.before), "after": effect(&change.after),
    })
}
