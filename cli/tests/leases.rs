//! What the holder of a lease says while proxyd is away, or refuses to open the lease again.
use std::process::Stdio;
use std::time::Duration;

use ipc::daemon::{Inherited, Kind};
use ipc::fault::{Code, Fault};
use ipc::fd::{Channel, ChannelListener};
use ipc::layout::Layout;
use ipc::lease::{LeaseReply, LeaseRequest, Opened};
use tokio::io::{AsyncBufReadExt, BufReader};

/// Far above what any of these takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// Takes one request to open a lease, and answers with the refusal or, without one, opens it.
async fn answer(listener: &ChannelListener, refusal: Option<&str>) -> Channel {
    let channel = tokio::time::timeout(DEADLINE, listener.accept()).await.unwrap().unwrap();
    let (request, _sockets) = channel.receive::<LeaseRequest>().await.unwrap();
    let LeaseRequest::OpenFor { open, terms } = request else { panic!("{request:?}") };
    let reply = match refusal {
        Some(text) => LeaseReply::Refused { fault: Fault::new(Code::Denied, text) },
        None => LeaseReply::Opened(Opened {
            lease: open.lease,
            // One that goes on has its token already.
            token: terms.token_sha256.is_none().then(|| "token".to_owned()),
            ca_pem: String::new(),
            env: Vec::new(),
            generation: 1,
        }),
    };
    channel.send(&reply, &[]).await.unwrap();
    channel
}

#[tokio::test]
async fn the_same_refusal_is_said_once_until_it_changes() {
    let place = tempfile::tempdir().unwrap();
    let layout = Layout::below(place.path());
    let mut nothing = Inherited::from_environment().unwrap();
    let socket = ipc::daemon::listen(&mut nothing, &layout.proxyd_lease(), Kind::SeqPacket);
    let listener = ChannelListener::new(socket.unwrap()).unwrap();
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_cleanhands"));
    command.arg("--runtime-dir").arg(&layout.runtime).args(["lease", "open", "dev"]);
    command.env_clear().env("HOME", place.path()).env("XDG_RUNTIME_DIR", place.path());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut holder = command.spawn().unwrap();

    drop(answer(&listener, None).await);
    for refusal in ["one", "one", "two", "one"] {
        answer(&listener, Some(refusal)).await;
    }
    let _open = answer(&listener, None).await;

    let mut said = Vec::new();
    let mut lines = BufReader::new(holder.stderr.take().unwrap()).lines();
    while said.last().is_none_or(|line: &String| !line.ends_with("is open again")) {
        let line = tokio::time::timeout(DEADLINE, lines.next_line()).await.unwrap().unwrap();
        said.push(line.unwrap().replace("cleanhands: ", ""));
    }
    assert!(said[0].contains("proxyd is away"), "{said:?}");
    assert_eq!(said[1..said.len() - 1], ["one", "two", "one"]);
}
