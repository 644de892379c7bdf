//! The command line: every subcommand, flag and exit status, in one place.
//!
//! Unknown and stray arguments are errors with status 2. No flag takes a secret.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::NonEmptyStringValueParser;
use clap::{Parser, Subcommand, ValueEnum};

const EXIT_STATUS: &str = "\
Exit status:
  0    done
  1    it failed; the message says what
  2    wrong use
  77   this host lacks what sandboxes need; the message has the one command that enables it
  78   a configuration or policy file is wrong
`run` and `exec` have more of their own: see their --help.";

const RUN_STATUS: &str = "\
Exit status:
  0    the agent ended its turn
  1    it failed
  3    the agent waits for somebody (a confirmation or a custom tool's result)
  4    the model could not be reached or gave up after retries
  5    the model refused
  6    the session was terminated
  130  interrupted: by Ctrl-C, SIGTERM or the terminal's end";

const EXEC_STATUS: &str = "\
Exit status:
  the command's own; 128+N when signal N ended it; 125 when it could not be run at all";

/// What names something is not empty.
fn named() -> NonEmptyStringValueParser {
    NonEmptyStringValueParser::new()
}

/// Agents that use your credentials without ever holding them.
#[derive(Debug, Parser)]
#[command(name = "cleanhands", version, about, after_help = EXIT_STATUS)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that every subcommand understands.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct Global {
    /// Print JSON, one object a line where there are many
    #[arg(long, global = true)]
    pub json: bool,
    /// Where the daemons' sockets are [default: yours if they run, else the system's]
    #[arg(long, global = true, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Play the whole story in a private directory: no key, no root, ends by itself
    Demo(Demo),
    /// Run the three daemons in the foreground; Ctrl-C drains them
    Up(Up),
    /// Give an agent a task and stream what it does
    #[command(after_help = RUN_STATUS)]
    Run(Run),
    /// Run one command in a sandbox with the policy's egress, without an agent
    #[command(after_help = EXEC_STATUS)]
    Exec(Exec),
    /// Put secrets in the vault, list their names, remove them
    #[command(subcommand)]
    Secret(Secret),
    /// Make keys for the API's loopback port, list their names, remove them
    #[command(subcommand)]
    Key(Key),
    /// Look at sessions and verify their logs
    #[command(subcommand)]
    Session(Session),
    /// Show what was allowed out and what was denied, and why
    Audit(Audit),
    /// Check policy files
    #[command(subcommand)]
    Policy(Policy),
    /// Check this host, the daemons, the policies and the vault
    Doctor,
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
    #[command(flatten)]
    Hidden(Hidden),
}

/// What packaging asks for, and the roles in which the demo starts this program again.
#[derive(Debug, Subcommand)]
pub enum Hidden {
    /// Draw a token, seal it in the vault, print how to recognise it
    #[command(hide = true)]
    DemoSeal,
    /// Serve the demo's billing API
    #[command(hide = true)]
    DemoBilling {
        #[arg(long)]
        ca: PathBuf,
    },
    /// Write the manual pages into a directory
    #[command(hide = true)]
    Man { directory: PathBuf },
}

#[derive(Debug, clap::Args)]
pub struct Demo {
    /// Keep the private directory and say where it is
    #[arg(long)]
    pub keep: bool,
}

#[derive(Debug, clap::Args)]
pub struct Up {
    /// Directory for the daemons' state [default: $XDG_STATE_HOME/cleanhands]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Directory of policy files
    #[arg(long, value_name = "DIR", default_value = "policies")]
    pub policies: PathBuf,
    /// Directory of proxyd.toml, sandboxd.toml, harnessd.toml, all optional
    /// [default: $XDG_CONFIG_HOME/cleanhands]
    #[arg(long, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// Serve the API on this port of 127.0.0.1 too; callers need a key (`cleanhands key add`)
    #[arg(long, value_name = "N")]
    pub port: Option<u16>,
    /// Level of the daemons' logs
    #[arg(long, value_name = "LEVEL", value_parser = ["error", "warn", "info", "debug"])]
    pub log: Option<String>,
}

#[derive(Debug, clap::Args)]
pub struct Run {
    /// The policy file that rules the sandbox, without .toml
    #[arg(long, short, value_name = "NAME", value_parser = named())]
    pub environment: String,
    /// A directory of yours to work in, read-write [default: a fresh one]
    #[arg(long, short, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// A model of harnessd's table [default: the first one]
    #[arg(long, short, value_name = "NAME", value_parser = named())]
    pub model: Option<String>,
    /// What the agent shall do; - reads it from standard input
    pub task: String,
}

#[derive(Debug, clap::Args)]
pub struct Exec {
    /// The policy file that rules the sandbox, without .toml
    #[arg(long, short, value_name = "NAME", value_parser = named())]
    pub environment: String,
    /// A directory of yours to work in, read-write [default: a fresh one, gone afterwards]
    #[arg(long, short, value_name = "DIR")]
    pub workspace: Option<PathBuf>,
    /// The command and its arguments, after --
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub argv: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
pub enum Secret {
    /// Store a value read from standard input; an older version is replaced
    Set {
        #[arg(value_parser = named())]
        name: String,
    },
    /// List names, versions and last use; never values
    List,
    /// Remove a secret and all its versions
    Remove {
        #[arg(value_parser = named())]
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Key {
    /// Make a key that stands for you and print it, once
    Add {
        #[arg(value_parser = named())]
        name: String,
    },
    /// List the names of your keys
    List,
    /// Remove a key; whoever has it is out at once
    Remove {
        #[arg(value_parser = named())]
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Session {
    /// List sessions, newest first
    List {
        /// Include archived ones
        #[arg(long)]
        all: bool,
    },
    /// Show one session's facts
    Show {
        #[arg(value_parser = named())]
        session: String,
    },
    /// Show what happened in a session
    Events {
        #[arg(value_parser = named())]
        session: String,
    },
    /// Check the hash chain of a session's log
    Verify {
        #[arg(value_parser = named())]
        session: String,
    },
}

#[derive(Debug, clap::Args)]
pub struct Audit {
    /// Wait for new records
    #[arg(long, short)]
    pub follow: bool,
    /// Check the hash chain instead
    #[arg(long, conflicts_with = "follow")]
    pub verify: bool,
    /// Only what was decided this way
    #[arg(long, value_name = "KIND")]
    pub kind: Option<Kind>,
    /// Only this session's
    #[arg(long, value_name = "ID")]
    pub session: Option<String>,
    /// Only this lease's
    #[arg(long, value_name = "ID")]
    pub lease: Option<String>,
    /// Only this tool call's
    #[arg(long, value_name = "ID")]
    pub call: Option<String>,
    /// Only requests to this host
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Allowed,
    Denied,
    Outcome,
    Note,
}

#[derive(Debug, Subcommand)]
pub enum Policy {
    /// Check every file of a directory and show what is wrong where
    Check {
        #[arg(default_value = "policies")]
        dir: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_commands_own_flags_are_not_taken_for_ours() {
        let words = ["cleanhands", "exec", "-e", "dev", "--", "ls", "--json", "-e", "x"];
        let args = Args::try_parse_from(words).unwrap();

        assert!(!args.global.json);
        assert!(matches!(args.command, Command::Exec(e) if e.argv == ["ls", "--json", "-e", "x"]));
    }

    #[test]
    fn a_secrets_value_is_no_argument() {
        assert!(Args::try_parse_from(["cleanhands", "secret", "set", "a", "value"]).is_err());
    }

    #[test]
    fn an_empty_name_is_wrong_use() {
        for words in [["secret", "set", ""], ["session", "show", ""], ["key", "add", ""]] {
            let words = ["cleanhands"].into_iter().chain(words);
            assert!(Args::try_parse_from(words).is_err());
        }
    }

    #[test]
    fn json_may_stand_anywhere() {
        for words in [["cleanhands", "--json", "doctor"], ["cleanhands", "doctor", "--json"]] {
            assert!(Args::try_parse_from(words).unwrap().global.json);
        }
    }
}
