//! What a holder may ask for.

use ipc::id::CallId;

use super::super::Leases;
use super::super::budgets::Budgets;
use super::super::names::Names;
use super::super::share::Shares;
use super::*;
use crate::tls::authority::AuthorityId;

fn opening() -> Open {
    Open {
        version: VERSION,
        lease: LeaseId::random(),
        holder: Holder::Explicit,
        environment: "dev".to_owned(),
        owner: Principal::own().owner(),
        sandbox: None,
        session: None,
        descriptors: Vec::new(),
    }
}

fn lease(dir: &std::path::Path) -> Arc<Lease> {
    let open = opening();
    let names = Names::open(&dir.join("names"), "x").unwrap();
    let (shares, end) = (Shares::here(), CancellationToken::new());
    let shares = (&shares, shares.lease("x", 0).unwrap());
    let kept = (names, Budgets::default());
    Arc::new(Lease::new(open, &Terms::default(), kept, shares, end))
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_asks_without_end_is_heard_again_as_answers_go_out() {
    const QUESTIONS: usize = 3 * CALLS_MAX;
    let dir = tempfile::tempdir().unwrap();
    let lease = lease(dir.path());
    let (ours, holders) = ipc::fd::pair().unwrap();
    let (channel, holder) = (Channel::new(ours).unwrap(), Arc::new(Channel::new(holders).unwrap()));
    // As long as one is being opened, answers wait.
    let _opening = lease.notes.opening();
    let listening = tokio::spawn({
        let (channel, lease) = (Arc::new(channel), Arc::clone(&lease));
        async move { listen(&channel, &lease, &CancellationToken::new()).await }
    });
    let asking = tokio::spawn({
        let holder = Arc::clone(&holder);
        async move {
            for _ in 0..QUESTIONS {
                let call = CallId::random();
                holder.send(&LeaseRequest::Refusals { call }, &[]).await.unwrap();
            }
        }
    });

    // No time passes while this task is always ready.
    let mut most = 0;
    for _ in 0..20_000 {
        tokio::task::yield_now().await;
        most = most.max(tokio::runtime::Handle::current().metrics().num_alive_tasks());
    }
    for _ in 0..QUESTIONS {
        let (reply, _) = holder.receive::<LeaseReply>().await.unwrap();
        assert!(matches!(reply, LeaseReply::Refusals { .. }), "{reply:?}");
    }
    asking.await.unwrap();
    holder.send(&LeaseRequest::Close, &[]).await.unwrap();

    assert!(listening.await.unwrap());
    // One for each question that waits, and those two, of which one may have ended.
    assert!((CALLS_MAX..=CALLS_MAX + 2).contains(&most), "{most} tasks");
}

#[test]
fn a_token_stands_for_no_lease_from_its_end_on_although_its_holder_is_still_told() {
    let dir = tempfile::tempdir().unwrap();
    let leases = Leases::open(dir.path()).unwrap();
    let token = Some(Hash::of("token"));
    let choose = |_| AuthorityId::parse(&"0".repeat(16)).unwrap();
    let end = CancellationToken::new();
    let lease = leases.enter(opening(), &Terms::default(), token, end, choose).ok().unwrap();
    let open = (leases.by_token("token").is_some(), leases.views().len());

    lease.finish("its time is over");

    assert_eq!(open, (true, 1));
    assert!(leases.by_token("token").is_none(), "a client would be cut without a word");
    assert!(leases.views().is_empty());
}
