//! `cleanhands ca`: the certificate authorities that sandboxes and other clients of leases trust.

use std::process::ExitCode;

use bytes::Bytes;
use ipc::http::Client;
use ipc::vault::CertificateAuthority;

use crate::args::{Ca, Global};
use crate::failure::Failure;
use crate::{place, term};

#[derive(serde::Deserialize)]
struct List {
    authorities: Vec<CertificateAuthority>,
}

pub async fn ca(global: &Global, what: Ca) -> Result<ExitCode, Failure> {
    let proxyd = Client::new(place::layout(global).proxyd());
    let list = match what {
        Ca::List => proxyd.get::<List>("/v1/authorities").await?,
        Ca::Rotate => rotate(&proxyd).await?,
    };
    if global.json {
        for authority in &list.authorities {
            term::json_line(authority)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let heads = ["SHA-256", "VALID UNTIL", "LEASES", "STATE"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(list.authorities.into_iter().map(|authority| {
        let state = if authority.issues { "for new leases" } else { "until its leases end" };
        let leases = authority.leases.to_string();
        vec![authority.sha256, authority.valid_until, leases, state.to_owned()]
    }));
    term::write_out(term::columns(&rows).as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

async fn rotate(proxyd: &Client) -> Result<List, Failure> {
    let path = "/v1/authorities/rotate";
    let answer = proxyd.call(http::Method::POST, path, None, Bytes::new()).await?;
    serde_json::from_slice(&answer)
        .map_err(|error| Failure::new(format!("proxyd: answer is not as documented: {error}")))
}
