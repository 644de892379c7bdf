//! `cleanhands question`: what proxyd holds until an operator has answered, and the answers.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use clap::builder::NonEmptyStringValueParser as Named;
use ipc::fault::Code;
use ipc::http::Client;
use ipc::question::{Answered, Question, QuestionPage, Reply, Verdict};

use crate::api::segment;
use crate::args::{self, Global};
use crate::failure::Failure;
use crate::place;
use crate::term::{self, Style, printable};

#[derive(Debug, Subcommand)]
pub enum Questions {
    /// List the requests and connections that are held until somebody answers
    List {
        /// Show what comes, as it comes
        #[arg(long, short)]
        follow: bool,
    },
    /// Let one go on
    Allow {
        #[arg(value_parser = Named::new())]
        question: String,
        /// Let all go on, for so long, that the same rule asks about the same sandbox or lease
        #[arg(long = "for", value_name = "TIME", value_parser = args::time)]
        span: Option<Duration>,
    },
    /// Refuse one
    Deny {
        #[arg(value_parser = Named::new())]
        question: String,
        /// Refuse all, for so long, that the same rule asks about the same sandbox or lease
        #[arg(long = "for", value_name = "TIME", value_parser = args::time)]
        span: Option<Duration>,
    },
}

/// How long to wait before proxyd is looked for again.
const AGAIN: Duration = Duration::from_millis(500);

pub async fn question(global: &Global, what: Questions) -> Result<ExitCode, Failure> {
    let proxyd = Client::new(place::layout(global).proxyd());
    match what {
        Questions::List { follow: false } => {
            let page: QuestionPage = proxyd.get("/v1/questions").await?;
            if page.questions.is_empty() && !global.json {
                term::line("no questions")?;
            }
            page.questions.iter().try_for_each(|question| show(global, question))?;
            Ok(ExitCode::SUCCESS)
        }
        Questions::List { follow: true } => {
            tokio::select! {
                followed = follow(global, &proxyd) => followed,
                _ = tokio::signal::ctrl_c() => Ok(ExitCode::SUCCESS),
            }
        }
        Questions::Allow { question, span } => {
            answer(global, &proxyd, &question, Verdict::Allow, span).await
        }
        Questions::Deny { question, span } => {
            answer(global, &proxyd, &question, Verdict::Deny, span).await
        }
    }
}

/// Shows each question once, as it comes.
async fn follow(global: &Global, proxyd: &Client) -> Result<ExitCode, Failure> {
    let mut shown = BTreeSet::new();
    let mut after = None;
    let mut away = false;
    loop {
        let query = after.map(|after: u64| format!("?after={after}")).unwrap_or_default();
        let page: QuestionPage = match proxyd.get(&format!("/v1/questions{query}")).await {
            // Whoever follows outlasts a restart of proxyd, once it was there.
            Err(fault) if fault.code == Code::Unavailable && after.is_some() => {
                if !std::mem::replace(&mut away, true) {
                    term::aside(&format!("cleanhands: {}; waiting for it", fault.text));
                }
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            page => page?,
        };
        away = false;
        for question in &page.questions {
            if !shown.contains(&question.question) {
                show(global, question)?;
            }
        }
        shown = page.questions.into_iter().map(|question| question.question).collect();
        after = Some(page.last);
    }
}

fn show(global: &Global, question: &Question) -> Result<(), Failure> {
    if global.json {
        return term::json_line(question);
    }
    term::line(&text(Style::of_stdout(), question))
}

/// What is asked, in a line, and by whom, in the next. Nearly all of it is what a sandbox sent.
fn text(style: Style, question: &Question) -> String {
    let plain = |text: &str| printable(text).replace(['\n', '\t'], "\u{fffd}");
    let Question { host, port, .. } = question;
    let query = question.query.as_deref().map(|query| format!("?{query}")).unwrap_or_default();
    let path = question.path.as_deref().unwrap_or_default();
    let what = question.method.as_deref().unwrap_or("connection to");
    let mut lines = vec![format!(
        "{}  {}",
        style.bold(question.question.as_str()),
        plain(&format!("{what} {host}:{port}{path}{query}"))
    )];
    lines.extend(question.taken.iter().map(|taken| format!("    {}", style.warn(&plain(taken)))));
    let credential = question.credential.as_deref();
    let with = credential.map(|name| format!(" with credential {name}")).unwrap_or_default();
    let session = question.session.as_ref().map(|id| format!(", session {id}"));
    lines.push(format!(
        "    {} asks{with}; environment {}, for {}, lease {}{}; {} s left",
        plain(&question.rule),
        plain(&question.environment),
        plain(&question.owner),
        question.lease,
        session.unwrap_or_default(),
        question.seconds_left
    ));
    lines.join("\n")
}

async fn answer(
    global: &Global,
    proxyd: &Client,
    question: &str,
    answer: Verdict,
    span: Option<Duration>,
) -> Result<ExitCode, Failure> {
    let path = format!("/v1/questions/{}", segment(question));
    let reply = Reply { answer, for_seconds: span.map(|span| span.as_secs()) };
    let answered: Answered = proxyd.post(&path, &reply).await?;
    if global.json {
        term::json_line(&answered)?;
        return Ok(ExitCode::SUCCESS);
    }
    let verdict = match answer {
        Verdict::Allow => "allowed",
        Verdict::Deny => "denied",
    };
    let others = match answered.others {
        0 => String::new(),
        others => format!(", and {others} more like it"),
    };
    term::line(&format!("{verdict} {}{others}", answered.question))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn question(path: &str) -> Question {
        serde_json::from_value(json!({
            "question": "ask_1", "request": "req_1", "asked_at": "t", "seconds_left": 9,
            "environment": "dev", "lease": "lease_1", "owner": "uid:1", "session": null,
            "sandbox": null, "calls": [], "rule": "egress.allow[0]", "credential": "github",
            "host": "a.example", "port": 443, "method": "POST", "path": path, "query": "b=1",
            "taken": ["X-HTTP-Method asks for DELETE /x"],
        }))
        .unwrap()
    }

    #[test]
    fn a_question_says_all_that_is_to_be_judged() {
        let text = text(Style::plain(), &question("/x"));

        assert_eq!(
            text,
            "ask_1  POST a.example:443/x?b=1\n    X-HTTP-Method asks for DELETE /x\n    \
             egress.allow[0] asks with credential github; environment dev, for uid:1, lease \
             lease_1; 9 s left"
        );
    }

    #[test]
    fn what_a_sandbox_sent_makes_no_lines_and_moves_no_cursor() {
        let text = text(Style::plain(), &question("/x\n\u{1b}[2Jask_2  GET harmless"));

        assert_eq!(text.lines().count(), 3);
        assert!(!text.contains('\u{1b}'));
    }
}
