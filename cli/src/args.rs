//! The command line: every subcommand, flag and exit status, in one place.
//!
//! Unknown and stray arguments are errors with status 2. No flag takes a secret.

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::NonEmptyStringValueParser;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

const EXIT_STATUS: &str = "\
Exit status:
  0    done
  1    it failed; the message says what
  2    wrong use
  77   this host lacks what sandboxes need; the message has the one command that enables it
  78   a configuration or policy file is wrong
`run` and `exec` have more of their own: see their --help.";

const SET_EXAMPLE: &str = "\
Example:
  cleanhands secret set github < token.txt
  and in a policy file: secret = \"local:github\"";

const RUN_STATUS: &str = "\
Example:
  cleanhands run --environment dev --workspace . \"What does this project do?\"

Exit status:
  0    the agent ended its turn
  1    it failed
  3    the agent waits for somebody (a confirmation or a custom tool's result)
  4    the model could not be reached or gave up after retries
  5    the model refused
  6    the session was terminated
  130  interrupted: by Ctrl-C, SIGTERM or the terminal's end";

const LEASE_STATUS: &str = "\
Examples:
  cleanhands lease open dev -- ./ci.sh
  cleanhands lease open dev --ttl 8h --docker > lease.args

Exit status:
  0    ended by Ctrl-C
  1    the lease could not be opened, or was ended: it expired, or somebody closed it
  with a command, the command's own; 128+N when signal N ended it; 125 when it could not be run";

const EXEC_STATUS: &str = "\
Example:
  cleanhands exec --environment dev --workspace . -- make test

It runs until it ends or you do: the policy's tool-timeout is for agents' calls, `timeout 2m` in
front of the command bounds it. When it fails, what became of its requests is told on standard
error: refused, failed, or given up by the client.

Exit status:
  the command's own; 128+N when signal N ended it; 125 when it could not be run at all";

const CHECK_STATUS: &str = "\
Exit status:
  0    the files are right
  77   with --here: they are, and this host lacks what a sandbox of them needs
  78   a file is wrong, or an environment can have no sandbox on any host";

const EXPLAIN_STATUS: &str = "\
Example:
  cleanhands policy explain dev https://api.github.com/repos/acme/widget -m DELETE

Exit status:
  0    it would be allowed
  3    it would be denied
  78   a policy file is wrong";

const DIFFERENCE_STATUS: &str = "\
Exit status:
  0    nothing would be otherwise
  3    something would be
  78   a policy file is wrong";

/// A time span as in policies, of some length.
pub fn time(text: &str) -> Result<Duration, String> {
    match policies::time_span(text)? {
        Duration::ZERO => Err("that is no time at all".to_owned()),
        span => Ok(span),
    }
}

/// An address with or without a port.
fn address(text: &str) -> Result<SocketAddr, String> {
    let whole = text.parse();
    whole
        .or_else(|_| {
            let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
            bare.unwrap_or(text).parse().map(|ip: IpAddr| SocketAddr::new(ip, 0))
        })
        .map_err(|_| "not an address, as in 127.0.0.1 or 172.17.0.1:3128".to_owned())
}

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
    /// List the certificate authorities that clients of leases trust, make a new one
    #[command(subcommand)]
    Ca(Ca),
    /// Make keys for the API's loopback port, list their names, remove them
    #[command(subcommand)]
    Key(Key),
    /// Let containers, VMs and CI jobs use a policy's egress: open, list and close leases
    #[command(subcommand)]
    Lease(Lease),
    /// Look at sessions and verify their logs
    #[command(subcommand)]
    Session(Session),
    /// Show what was allowed out and what was denied, and why
    Audit(Audit),
    /// Show what waits for an operator's yes, and answer
    #[command(subcommand)]
    Question(crate::question::Questions),
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
    // In place of the global flag: the demo's daemons are its own, so it is not offered.
    #[arg(long, hide = true, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
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
    #[command(after_help = SET_EXAMPLE)]
    Set {
        /// The name that policies use: A-Z a-z 0-9 . _ - after a letter or digit
        #[arg(value_parser = named())]
        name: String,
    },
    /// List names, versions and last use; never values
    List,
    /// Give the vault a new data key and seal every value anew; values stay as they are
    Rotate {
        /// Replace the key file that proxyd made, around the data key, and nothing else
        #[arg(long)]
        wrapping_key: bool,
    },
    /// Remove a secret and all its versions
    Remove {
        #[arg(value_parser = named())]
        name: String,
    },
}

#[derive(Debug, Subcommand)]
pub enum Ca {
    /// List the certificate authorities and how many leases trust each
    List,
    /// Make a new certificate authority for leases that begin from now on
    ///
    /// Open leases, and so living sandboxes, keep the one that they began with. It is retired, and
    /// its key wiped, when the last of them has ended: `cleanhands ca list` shows it until then.
    Rotate,
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
pub enum Lease {
    /// Open a lease and keep it until Ctrl-C, or for as long as a command runs
    #[command(after_help = LEASE_STATUS)]
    Open(OpenLease),
    /// List the open leases that are yours; all of them for root
    List,
    /// End a lease and everything under way on it
    Close {
        #[arg(value_parser = named())]
        lease: String,
    },
}

#[derive(Debug, clap::Args)]
pub struct OpenLease {
    /// The policy file that rules the lease, without .toml
    #[arg(value_name = "ENVIRONMENT", value_parser = named())]
    pub environment: String,
    /// End the lease after this time: 90s, 30m, 8h, 2d
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub ttl: Option<Duration>,
    /// Listen on a TCP address; without one on loopback, at a port that the system chooses.
    /// Addresses beyond loopback must stand in lease-addresses of proxyd.toml
    #[arg(long, value_name = "ADDRESS[:PORT]", num_args = 0..=1, require_equals = true,
        default_missing_value = "127.0.0.1", value_parser = address, conflicts_with = "unix")]
    pub tcp: Option<SocketAddr>,
    /// Listen on a Unix socket of your own, on which you need no token: for programs that can be
    /// told of such a proxy, since no variable leads to it
    #[arg(long, conflicts_with_all = ["shell", "docker", "argv"])]
    pub unix: bool,
    /// Print the variables as lines for a shell
    #[arg(long, conflicts_with_all = ["docker", "json"])]
    pub shell: bool,
    /// Print arguments for docker run and podman run
    #[arg(long, conflicts_with = "json")]
    pub docker: bool,
    /// A command to run with the variables, after --; the lease ends with it
    #[arg(last = true, value_name = "COMMAND", conflicts_with_all = ["shell", "docker"])]
    pub argv: Vec<OsString>,
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
    /// Write a session to a file, whole and with its hashes, while it runs or not
    Export {
        #[arg(value_parser = named())]
        session: String,
        /// The file, which must not exist yet [default: standard output]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Take a session in from a file that `export` wrote; it rests until somebody speaks to it
    Import {
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Copy the log of all sessions to a file, while everything runs
    Backup {
        /// The file, which must not exist yet
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Choose what the model is shown of a session from its next request on
    Profile {
        #[arg(value_parser = named())]
        session: String,
        /// whole-log, last-n[:STEPS], summary[:TOKENS[:STEPS]] or reset[:TOKENS]
        profile: String,
    },
    /// Compare what profiles would have shown the model of a session; nothing is asked
    Replay {
        #[arg(value_parser = named())]
        session: String,
        /// A profile; may be given more than once
        #[arg(long = "profile", value_name = "PROFILE", required = true)]
        profiles: Vec<String>,
    },
}

#[derive(Debug, Default, clap::Args)]
pub struct Audit {
    /// Show new records as they come, from now on or from --since on
    #[arg(long, short)]
    pub follow: bool,
    /// Check the hash chain instead
    #[arg(long, conflicts_with_all = ["follow", "since", "until"])]
    pub verify: bool,
    /// Only from then on: 2026-01-31T12:00:00Z, 2026-01-31, or how long ago, as 30m, 12h, 7d
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Only what is earlier
    #[arg(long, value_name = "TIME", conflicts_with = "follow")]
    pub until: Option<String>,
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
    /// Only what this rule decided, as egress.allow[2]
    #[arg(long, value_name = "RULE")]
    pub rule: Option<String>,
    /// Only what this credential was put into
    #[arg(long, value_name = "NAME")]
    pub credential: Option<String>,
    /// Only this environment's
    #[arg(long, value_name = "NAME")]
    pub environment: Option<String>,
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
    ///
    /// What no host could do is an error. What only this host can tell (directories of `root` and
    /// `mounts`, the kernel) is shown beside it, and counts with --here: leave that out where
    /// files are checked for another host, as in CI.
    #[command(after_help = CHECK_STATUS)]
    Check {
        #[arg(default_value = "policies")]
        dir: PathBuf,
        /// Fail where sandboxes could not be made on this host
        #[arg(long)]
        here: bool,
    },
    /// Say what would become of one request, and why, rule by rule
    #[command(after_help = EXPLAIN_STATUS)]
    Explain(Explain),
    /// Compare two directories of policies by what they would do
    ///
    /// One line for each class of requests that would be treated otherwise: + now allowed, - now
    /// denied, ~ with another credential or to other addresses. Settings of sandboxes are told as a
    /// whole.
    #[command(after_help = DIFFERENCE_STATUS)]
    Diff { before: PathBuf, after: PathBuf },
    /// Judge what the audit has recorded by these policies, and show what would be otherwise
    ///
    /// The audit keeps no query: what a fetch and a push of git ask first is told by the reason of
    /// a denial alone.
    #[command(after_help = DIFFERENCE_STATUS)]
    Replay {
        /// Records as `cleanhands audit --json` prints them, - for standard input [default: the
        /// running proxyd's]
        file: Option<PathBuf>,
        #[arg(long, value_name = "DIR", default_value = "policies")]
        policies: PathBuf,
    },
}

#[derive(Debug, clap::Args)]
pub struct Explain {
    /// The environment, as dev for dev.toml
    #[arg(value_parser = named())]
    pub environment: String,
    /// https://host/path?query, or host:port for a connection of any protocol
    #[arg(value_parser = named())]
    pub url: String,
    #[arg(long, short, default_value = "GET", value_parser = named())]
    pub method: String,
    #[arg(long, value_name = "DIR", default_value = "policies")]
    pub policies: PathBuf,
}

/// The subcommand that a line names which could not be read; none where that cannot be told.
pub fn subcommand(words: &[OsString]) -> Option<String> {
    let command = Args::command();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let word = word.to_str()?;
        let Some(flag) = word.strip_prefix("--") else {
            return command.find_subcommand(word).map(|found| found.get_name().to_owned());
        };
        let (name, joined) = flag.split_once('=').map_or((flag, false), |(name, _)| (name, true));
        let flag = command.get_arguments().find(|known| known.get_long() == Some(name))?;
        if flag.get_action().takes_values() && !joined {
            words.next();
        }
    }
    None
}

/// Whether a line that could not be read asks for JSON: what stands after `--` belongs to another
/// command.
pub fn wants_json(words: &[OsString]) -> bool {
    words.iter().take_while(|word| *word != "--").any(|word| word == "--json")
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_subcommand_is_the_first_word_that_is_no_flag_and_no_flags_value() {
        for (line, named) in [
            ("secret set x", Some("secret")),
            ("--json secret", Some("secret")),
            ("--runtime-dir /run secret", Some("secret")),
            ("--runtime-dir=/run secret", Some("secret")),
            ("--runtime-dir secret exec", Some("exec")),
            ("exec -- secret", Some("exec")),
            ("run secret", Some("run")),
            ("--runtime-dir secret", None),
            ("--unknown secret", None),
            ("-x secret", None),
            ("-- secret", None),
            ("unknown secret", None),
            ("", None),
        ] {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            assert_eq!(subcommand(&words).as_deref(), named, "{line}");
        }
    }

    #[test]
    fn json_may_stand_anywhere() {
        for words in [["cleanhands", "--json", "doctor"], ["cleanhands", "doctor", "--json"]] {
            assert!(Args::try_parse_from(words).unwrap().global.json);
        }
    }
}
