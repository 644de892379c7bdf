//! A rule that asks: what it allows waits for an operator, bounded, and leaves only by a yes.

use crate::support::*;
use ipc::fault::{Code, Fault};
use ipc::id::LeaseId;
use ipc::peer::Principal;
use ipc::question::{Answered, Question, QuestionPage, Reply, Verdict};
use ipc::vault::{AuditKind, AuditRecord};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const H1: &[&[u8]] = &[b"http/1.1"];

/// `api.test` asks about each path for itself, with the credential; `raw.test` about connections.
const ASKS: &str = r#"
[[egress.allow]]
hosts = ["api.test"]
paths = ["/one/**"]
addresses = ["127.0.0.1/32"]
credential = "api"
ask = true

[[egress.allow]]
hosts = ["api.test"]
paths = ["/two/**"]
addresses = ["127.0.0.1/32"]
ask = { within = "10m" }

[[egress.allow]]
hosts = ["api.test"]
paths = ["/short/**"]
addresses = ["127.0.0.1/32"]
ask = { within = "1s" }

[[egress.allow]]
hosts = ["raw.test"]
ports = [9000]
addresses = ["127.0.0.1/32"]
ask = true

[credentials.api]
secret = "local:api"
inject = { bearer = true }
hosts = ["api.test"]
env = "API_TOKEN"
"#;

async fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while let Ok(1) = stream.read(&mut byte).await {
        let _ = stream.write_all(&byte).await;
    }
}

async fn page(proxyd: &Proxyd) -> QuestionPage {
    proxyd.control().get("/v1/questions").await.unwrap()
}

/// Waits until so many are open.
async fn held(proxyd: &Proxyd, count: usize) -> Vec<Question> {
    until("so many questions are open", || async { page(proxyd).await.questions.len() == count })
        .await;
    page(proxyd).await.questions
}

async fn one_held(proxyd: &Proxyd) -> Question {
    held(proxyd, 1).await.remove(0)
}

async fn say(
    proxyd: &Proxyd,
    question: &Question,
    answer: Verdict,
    for_seconds: Option<u64>,
) -> Result<Answered, Fault> {
    let path = format!("/v1/questions/{}", question.question);
    proxyd.control().post(&path, &Reply { answer, for_seconds }).await
}

async fn send(stream: &mut (impl AsyncWriteExt + Unpin), head: &str) {
    stream.write_all(format!("{head}\r\nHost: api.test\r\n\r\n").as_bytes()).await.unwrap();
}

/// A request that waits on a connection of its own.
async fn asks(lease: &Lease, path: &str) -> Tls {
    let mut stream = lease.h1("api.test").await;
    send(&mut stream, &format!("GET {path} HTTP/1.1")).await;
    stream
}

async fn start(upstreams: &[(&str, &Upstream)]) -> Proxyd {
    let proxyd = Proxyd::start(ASKS, upstreams).await;
    proxyd.put_secret("api").await;
    proxyd
}

async fn records_of(proxyd: &Proxyd, question: &Question, count: usize) -> Vec<AuditRecord> {
    let of = |record: &AuditRecord| record.request.as_ref() == Some(&question.request);
    let all = || async { proxyd.audit().await.into_iter().filter(of).collect::<Vec<_>>() };
    until("it has come to its end", || async { all().await.len() >= count }).await;
    all().await
}

fn starts(record: &AuditRecord, text: &str) -> bool {
    record.reason.as_ref().is_some_and(|reason| reason.starts_with(text))
}

#[tokio::test]
async fn a_request_waits_for_a_yes_and_goes_on_whole_with_its_credential() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let before = page(&proxyd).await;
    assert!(before.questions.is_empty());
    let path = format!("/v1/questions?after={}", before.last);
    let control = proxyd.control();
    let following = tokio::spawn(async move { control.get::<QuestionPage>(&path).await.unwrap() });
    let mut stream = lease.h1("api.test").await;
    let begin = "POST /one/a?b=c HTTP/1.1\r\nHost: api.test\r\nContent-Length: 40000\r\n\r\nfirst";
    stream.write_all(begin.as_bytes()).await.unwrap();

    let question = timely(following).await.unwrap().questions.remove(0);
    assert_eq!(question.method.as_deref(), Some("POST"));
    assert_eq!(
        (question.path.as_deref(), question.query.as_deref()),
        (Some("/one/a"), Some("b=c"))
    );
    assert_eq!(
        (&question.rule[..], question.credential.as_deref()),
        ("egress.allow[0]", Some("api"))
    );
    assert_eq!((&question.environment[..], &question.lease), ("dev", &lease.opened.lease));
    assert!(question.seconds_left <= 90);
    assert_eq!(upstream.connections(), 0);
    say(&proxyd, &question, Verdict::Allow, None).await.unwrap();
    stream.write_all(&vec![b'x'; 40_000 - 5]).await.unwrap();

    let (head, body) = timely(response(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let text = String::from_utf8(body).unwrap();
    assert!(text.starts_with("POST /one/a?b=c ") && text.ends_with("xxx"));
    // The value was put in, and what came back of it is masked.
    assert!(field(&head, "x-echo").unwrap().starts_with("Bearer **"), "{head}");
    let records = records_of(&proxyd, &question, 4).await;
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    use AuditKind::{Allowed, Note, Outcome};
    assert_eq!(kinds, [Note, Note, Allowed, Outcome]);
    let (id, by) = (&question.question, Principal::own());
    assert!(starts(&records[0], &format!("question {id}: held for ")), "{:?}", records[0]);
    assert!(starts(&records[1], &format!("question {id}: allowed once by {by}")));
    assert!(starts(&records[2], &format!("question {id}: allowed by {by}")));
    assert_eq!(records[3].reason, None);
    assert!(records.iter().all(|record| record.rule.as_deref() == Some("egress.allow[0]")));
    let again = say(&proxyd, &question, Verdict::Allow, None).await.unwrap_err();
    assert_eq!(again.code, Code::NotFound);
}

#[tokio::test]
async fn a_no_and_no_answer_are_refusals_that_programs_read() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;

    let mut stream = asks(&lease, "/one/a").await;
    let question = one_held(&proxyd).await;
    say(&proxyd, &question, Verdict::Deny, None).await.unwrap();
    let (head, body) = timely(response(&mut stream)).await;
    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert_eq!(field(&head, "x-cleanhands-denial"), Some("question_denied"));
    let told: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(told["error"]["rule"], "egress.allow[0]");
    let records = records_of(&proxyd, &question, 3).await;
    assert!(records[2].kind == AuditKind::Denied && starts(&records[2], "question_denied: "));

    send(&mut stream, "GET /short/a HTTP/1.1").await;
    let (head, _) = timely(response(&mut stream)).await;
    assert_eq!(field(&head, "x-cleanhands-denial"), Some("question_unanswered"), "{head}");
    assert!(page(&proxyd).await.questions.is_empty());

    let mut sender = lease.h2("api.test").await;
    let grpc = http::Request::post("https://api.test/short/Call")
        .header("content-type", "application/grpc")
        .body(())
        .unwrap();
    let (answer, _) = sender.send_request(grpc, true).unwrap();
    let answer = timely(answer).await.unwrap();
    assert_eq!(answer.headers()["grpc-status"], "7");
    assert_eq!(answer.headers()["x-cleanhands-denial"], "question_unanswered");

    let git = "GET /short/w.git/info/refs?service=git-upload-pack HTTP/1.1\r\nUser-Agent: git/2.45";
    send(&mut stream, git).await;
    let (_, body) = timely(response(&mut stream)).await;
    assert!(String::from_utf8(body).unwrap().contains("ERR cleanhands: denied (question_unans"));
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn an_answer_for_a_time_serves_that_rule_and_that_lease_alone() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let (lease, other) = (proxyd.lease().await, proxyd.lease().await);
    let mut alike = [asks(&lease, "/two/a").await, asks(&lease, "/two/b").await];
    held(&proxyd, 2).await;
    let _elsewhere = asks(&other, "/two/a").await;
    let _otherwise = asks(&lease, "/one/a").await;
    let all = held(&proxyd, 4).await;
    let own = |question: &&Question| {
        question.lease == lease.opened.lease && question.rule == "egress.allow[1]"
    };
    let question = all.iter().find(own).unwrap();

    let answered = say(&proxyd, question, Verdict::Allow, Some(600)).await.unwrap();

    assert_eq!(answered.others, 1);
    for stream in &mut alike {
        assert!(timely(head(stream)).await.starts_with("HTTP/1.1 200 "));
    }
    let mut later = asks(&lease, "/two/c").await;
    assert!(timely(head(&mut later)).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(held(&proxyd, 2).await.iter().filter(own).count(), 0);
    let wrong = say(&proxyd, question, Verdict::Allow, Some(0)).await.unwrap_err();
    assert_eq!(wrong.code, Code::Invalid);
    // The last word counts, and what was said ends with the lease.
    let id = lease.opened.lease.clone();
    lease.close().await;
    let again = proxyd.open(id).await.unwrap();
    let _asked = asks(&again, "/two/d").await;
    until("it is asked about again", || async {
        page(&proxyd).await.questions.iter().any(|q| q.path.as_deref() == Some("/two/d"))
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_question_with_it() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;

    let plain = asks(&lease, "/two/a").await;
    let mut questions = vec![one_held(&proxyd).await];
    drop(plain);
    held(&proxyd, 0).await;

    let mut body = lease.h1("api.test").await;
    let half = b"POST /two/b HTTP/1.1\r\nHost: api.test\r\nContent-Length: 9\r\n\r\nhalf";
    body.write_all(half).await.unwrap();
    questions.push(one_held(&proxyd).await);
    drop(body);
    held(&proxyd, 0).await;

    let mut sender = lease.h2("api.test").await;
    let request = http::Request::get("https://api.test/two/c").body(()).unwrap();
    let (answer, mut sent) = sender.send_request(request, true).unwrap();
    questions.push(one_held(&proxyd).await);
    sent.send_reset(h2::Reason::CANCEL);
    drop(answer);
    held(&proxyd, 0).await;

    let tunnel = lease.connect("raw.test:9000").await;
    questions.push(one_held(&proxyd).await);
    drop(tunnel);
    held(&proxyd, 0).await;

    for question in &questions {
        let records = records_of(&proxyd, question, 2).await;
        let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
        assert_eq!(kinds, [AuditKind::Note, AuditKind::Denied], "{question:?}");
        assert!(starts(&records[1], "client_gone: "), "{:?}", records[1]);
    }
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn what_is_held_is_judged_again_when_files_change() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut taken_back = asks(&lease, "/one/a").await;
    let mut set_free = asks(&lease, "/two/a").await;
    let all = held(&proxyd, 2).await;
    let raw = lease.connect("raw.test:9000").await;
    let kept = held(&proxyd, 3).await.pop().unwrap();

    let changed = ASKS.replace("/one/**", "/none/**").replace("ask = { within = \"10m\" }", "");
    proxyd.write_policy(&changed);

    let denied = timely(head(&mut taken_back)).await;
    assert_eq!(field(&denied, "x-cleanhands-denial"), Some("path_not_listed"), "{denied}");
    assert!(timely(head(&mut set_free)).await.starts_with("HTTP/1.1 200 "));
    assert_eq!(one_held(&proxyd).await.question, kept.question);
    for question in &all {
        say(&proxyd, question, Verdict::Allow, None).await.unwrap_err();
    }
    drop(raw);
}

#[tokio::test]
async fn a_rule_that_is_changed_while_it_asks_asks_again() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = asks(&lease, "/two/a").await;
    let first = one_held(&proxyd).await;

    proxyd.write_policy(&ASKS.replace("\"/two/**\"", "\"/two/**\", \"/more\""));
    let another = || async {
        page(&proxyd).await.questions.first().is_some_and(|q| q.question != first.question)
    };
    until("it is asked about as it is now", another).await;

    say(&proxyd, &one_held(&proxyd).await, Verdict::Allow, None).await.unwrap();
    assert!(timely(head(&mut stream)).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_connection_that_is_passed_on_unread_waits_before_anything_is_dialled() {
    let raw = Upstream::tcp(echo).await;
    let proxyd = start(&[("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.connect("raw.test:9000").await;
    stream.write_all(b"x").await.unwrap();
    let question = one_held(&proxyd).await;
    assert_eq!((question.method.as_deref(), question.port), (None, 9000));
    assert_eq!(raw.connections(), 0);

    say(&proxyd, &question, Verdict::Allow, None).await.unwrap();
    let mut byte = [0];
    timely(stream.read_exact(&mut byte)).await.unwrap();
    assert_eq!(byte, *b"x");
    drop(stream);
    let records = records_of(&proxyd, &question, 4).await;
    let kinds: Vec<_> = records.iter().map(|record| record.kind).collect();
    use AuditKind::{Allowed, Note, Outcome};
    assert_eq!(kinds, [Note, Note, Allowed, Outcome]);

    let mut refused = lease.connect("raw.test:9000").await;
    refused.write_all(b"GET / HTTP/1.1\r\nHost: raw.test:9000\r\n\r\n").await.unwrap();
    say(&proxyd, &one_held(&proxyd).await, Verdict::Deny, None).await.unwrap();
    let denied = timely(head(&mut refused)).await;
    assert_eq!(field(&denied, "x-cleanhands-denial"), Some("question_denied"), "{denied}");
    assert_eq!(raw.connections(), 1);
}

#[tokio::test]
async fn a_rule_that_begins_to_ask_ends_what_nobody_was_asked_about() {
    let raw = Upstream::tcp(echo).await;
    let proxyd = start(&[("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let says_back = |mut stream: tokio::net::UnixStream| async move {
        let mut byte = [0];
        stream.write_all(b"x").await.ok()?;
        timely(stream.read_exact(&mut byte)).await.ok()?;
        Some(stream)
    };
    let answered = lease.connect("raw.test:9000").await;
    say(&proxyd, &one_held(&proxyd).await, Verdict::Allow, None).await.unwrap();
    let answered = says_back(answered).await.unwrap();
    proxyd.write_policy(&ASKS.replace("ask = true", ""));
    until("the rule asks no more", || async { proxyd.health().await.generation == 2 }).await;
    let mut free = says_back(lease.connect("raw.test:9000").await).await.unwrap();

    proxyd.write_policy(ASKS);

    // An end that no byte of the upstream's comes before.
    let _ = timely(free.read_to_end(&mut Vec::new())).await;
    says_back(answered).await.unwrap();
    let changed = |record: &AuditRecord| starts(record, "policy_changed");
    proxyd.record(changed).await;
}

#[tokio::test]
async fn one_lease_holds_so_many_and_leaves_room_for_others() {
    const HELD_MAX: usize = 16;
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let (greedy, other) = (proxyd.lease().await, proxyd.lease().await);
    let mut sender = greedy.h2("api.test").await;
    let mut send = |path: String| {
        let request = http::Request::get(format!("https://api.test{path}")).body(()).unwrap();
        sender.send_request(request, true).unwrap().0
    };
    let mut answers: Vec<_> = (0..HELD_MAX).map(|at| send(format!("/two/{at}"))).collect();
    let questions = held(&proxyd, HELD_MAX).await;

    let refused = timely(send("/two/more".to_owned())).await.unwrap();
    assert_eq!(refused.status(), 503);
    assert_eq!(refused.headers()["x-cleanhands-failure"], "questions_busy");
    assert_eq!(refused.headers()["retry-after"], "10");
    let _waits = asks(&other, "/two/a").await;
    held(&proxyd, HELD_MAX + 1).await;
    // What was answered leaves room.
    say(&proxyd, &questions[0], Verdict::Deny, None).await.unwrap();
    let path = questions[0].path.as_deref().unwrap();
    let at: usize = path.trim_start_matches("/two/").parse().unwrap();
    assert_eq!(timely(answers.swap_remove(at)).await.unwrap().status(), 403);
    held(&proxyd, HELD_MAX).await;
    let _next = send("/two/next".to_owned());
    held(&proxyd, HELD_MAX + 1).await;
    drop(answers);
}

#[tokio::test]
async fn a_client_that_asks_and_leaves_without_end_has_a_bounded_number_of_records() {
    const AT_ONCE: usize = 16;
    const REST_SECONDS: usize = 10;
    const ROUNDS: usize = 4;
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let (lease, other) = (proxyd.lease().await, proxyd.lease().await);
    let mut sender = lease.h2("api.test").await;
    let begun = std::time::Instant::now();
    let mut busy = 0;
    for round in 0..ROUNDS {
        let mut answers = tokio::task::JoinSet::new();
        for at in 0..AT_ONCE {
            let uri = format!("https://api.test/two/{round}-{at}");
            let request = http::Request::get(uri).body(()).unwrap();
            answers.spawn(sender.send_request(request, true).unwrap().0);
        }
        let mut answered = 0;
        let end = begun + DEADLINE;
        while page(&proxyd).await.questions.len() + answered < AT_ONCE {
            assert!(std::time::Instant::now() < end, "neither held nor answered");
            while let Some(answer) = answers.try_join_next() {
                let answer = answer.unwrap().unwrap();
                assert_eq!(answer.headers()["x-cleanhands-failure"], "questions_busy");
                answered += 1;
            }
        }
        busy += answered;
        // All of them are reset.
        answers.shutdown().await;
        held(&proxyd, 0).await;
    }

    let _waits = asks(&other, "/two/a").await;
    let waiting = one_held(&proxyd).await;
    let records = proxyd.audit().await;
    let of = |record: &&AuditRecord| record.request.as_ref() != Some(&waiting.request);
    let notes = records.iter().filter(of).filter(|r| starts(r, "question ")).count();
    let bound = AT_ONCE * (1 + begun.elapsed().as_secs() as usize / REST_SECONDS);
    assert_eq!(notes + busy, ROUNDS * AT_ONCE);
    assert!(notes <= bound, "{notes} questions where {bound} may be");
    // Each of them came to an end that is on record too.
    assert_eq!(records.iter().filter(|r| starts(r, "client_gone: ")).count(), notes);
}

#[tokio::test]
async fn every_question_has_its_decision_on_record_however_many_end_alike() {
    // More than denials that are alike are written singly.
    const ASKED: usize = 25;
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    let mut asked = Vec::new();
    for _ in 0..ASKED {
        send(&mut stream, "GET /two/a HTTP/1.1").await;
        let question = one_held(&proxyd).await;
        say(&proxyd, &question, Verdict::Deny, None).await.unwrap();
        let (head, _) = timely(response(&mut stream)).await;
        assert_eq!(field(&head, "x-cleanhands-denial"), Some("question_denied"), "{head}");
        asked.push(question.request);
    }

    let records = proxyd.audit().await;
    let denied = |request| {
        let own = |r: &&AuditRecord| r.request.as_ref() == Some(request);
        records.iter().filter(own).any(|r| r.kind == AuditKind::Denied)
    };
    assert!(asked.iter().all(denied));

    // What an answer for a time refuses is no question: it is counted as ever.
    send(&mut stream, "GET /two/a HTTP/1.1").await;
    say(&proxyd, &one_held(&proxyd).await, Verdict::Deny, Some(600)).await.unwrap();
    timely(response(&mut stream)).await;
    for _ in 0..10 * ASKED {
        send(&mut stream, "GET /two/standing HTTP/1.1").await;
        timely(response(&mut stream)).await;
    }
    let records = proxyd.audit().await;
    let singly = |record: &&AuditRecord| record.path.as_deref() == Some("/two/standing");
    assert!(records.iter().filter(singly).count() < 10 * ASKED);
}

#[tokio::test]
async fn nobody_is_asked_about_what_its_budget_has_no_room_for() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let raw = Upstream::tcp(echo).await;
    let policy = ASKS.replace("paths = [\"/two/**\"]", "paths = [\"/two/**\"]\nrate = \"1/day\"");
    let policy = policy.replace("ports = [9000]", "ports = [9000]\nrate = \"1/day\"");
    let proxyd = Proxyd::start(&policy, &[("api.test", &upstream), ("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let mut stream = asks(&lease, "/two/a").await;
    say(&proxyd, &one_held(&proxyd).await, Verdict::Allow, None).await.unwrap();
    assert!(timely(response(&mut stream)).await.0.starts_with("HTTP/1.1 200 "));

    send(&mut stream, "GET /two/b HTTP/1.1").await;
    let (refused, _) = timely(response(&mut stream)).await;
    assert_eq!(field(&refused, "x-cleanhands-denial"), Some("rate_exceeded"), "{refused}");

    let mut first = lease.connect("raw.test:9000").await;
    first.write_all(b"x").await.unwrap();
    say(&proxyd, &one_held(&proxyd).await, Verdict::Allow, None).await.unwrap();
    timely(first.read_u8()).await.unwrap();
    let mut second = lease.connect("raw.test:9000").await;
    second.write_all(b"GET / HTTP/1.1\r\nHost: raw.test:9000\r\n\r\n").await.unwrap();
    let refused = timely(head(&mut second)).await;
    assert_eq!(field(&refused, "x-cleanhands-denial"), Some("rate_exceeded"), "{refused}");
    assert!(page(&proxyd).await.questions.is_empty());
}

#[tokio::test]
async fn what_comes_on_a_connection_that_an_operator_refused_has_records_of_its_own() {
    let raw = Upstream::tcp(echo).await;
    let proxyd = start(&[("raw.test", &raw)]).await;
    let lease = proxyd.lease().await;
    let mut refused = lease.connect("raw.test:9000").await;
    let question = one_held(&proxyd).await;
    say(&proxyd, &question, Verdict::Deny, None).await.unwrap();

    let mut ids = Vec::new();
    for path in ["/a", "/b"] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: raw.test:9000\r\n\r\n");
        refused.write_all(request.as_bytes()).await.unwrap();
        let (head, _) = timely(response(&mut refused)).await;
        assert_eq!(field(&head, "x-cleanhands-denial"), Some("question_denied"), "{head}");
        ids.push(field(&head, "x-cleanhands-request").unwrap().to_owned());
        let own = |record: &AuditRecord| record.path.as_deref() == Some(path);
        let record = proxyd.record(own).await;
        assert_eq!(record.request.map(|id| id.as_str().to_owned()), ids.last().cloned());
        assert_eq!(record.method.as_deref(), Some("GET"));
    }
    assert_ne!(ids[0], ids[1]);
    let records = records_of(&proxyd, &question, 3).await;
    assert!(records[2].kind == AuditKind::Denied && starts(&records[2], "question_denied: "));
    assert_eq!(raw.connections(), 0);
}

#[tokio::test]
async fn what_a_request_may_be_taken_for_is_not_let_past_the_question() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let policy = r#"
        [[egress.allow]]
        hosts = ["api.test"]
        methods = ["POST"]
        addresses = ["127.0.0.1/32"]
        [[egress.allow]]
        hosts = ["api.test"]
        methods = ["DELETE"]
        addresses = ["127.0.0.1/32"]
        ask = true
    "#;
    let proxyd = Proxyd::start(policy, &[("api.test", &upstream)]).await;
    let lease = proxyd.lease().await;
    let mut stream = lease.h1("api.test").await;
    send(&mut stream, "POST /x HTTP/1.1\r\nX-HTTP-Method-Override: DELETE\r\nContent-Length: 0")
        .await;

    let (head, body) = timely(response(&mut stream)).await;

    assert!(head.starts_with("HTTP/1.1 403 "), "{head}");
    assert!(String::from_utf8(body).unwrap().contains("asks an operator"));
    assert_eq!(upstream.connections(), 0);
}

#[tokio::test]
async fn the_end_of_a_lease_or_of_proxyd_is_the_end_of_what_it_holds() {
    let upstream = Upstream::tls("api.test", H1, echo_h1).await;
    let mut proxyd = start(&[("api.test", &upstream)]).await;
    let lease = proxyd.open(LeaseId::random()).await.unwrap();
    let _held = asks(&lease, "/two/a").await;
    let question = one_held(&proxyd).await;

    lease.close().await;

    held(&proxyd, 0).await;
    let records = records_of(&proxyd, &question, 2).await;
    assert!(starts(&records[1], "client_gone: "), "{:?}", records[1]);
    let lease = proxyd.lease().await;
    let _held = asks(&lease, "/two/b").await;
    let question = one_held(&proxyd).await;
    proxyd.end(rustix::process::Signal::TERM);
    proxyd.begin();
    proxyd.serves().await;
    let records = records_of(&proxyd, &question, 2).await;
    // What of it ended first, the question or the lease, is chance.
    let ended = ["question_withdrawn: ", "client_gone: "];
    assert!(ended.iter().any(|code| starts(&records[1], code)), "{:?}", records[1]);
    assert_eq!(upstream.connections(), 0);
}
