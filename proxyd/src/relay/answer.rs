//! The upstream's answer, whichever protocol brings it.

use std::future::poll_fn;
use std::task::Poll;

use super::body::BodyIn;
use super::h1;
use super::h1::framing::{self, Ambiguous, Framing};
use super::h1::wire::HeadError;
use super::h2::{convert, describe};
use crate::head::ResponseHead;

/// Why there is no answer to pass on.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    #[error("upstream closed the connection without an answer")]
    Closed,
    #[error("{0}")]
    Head(#[from] HeadError),
    #[error("upstream's answer is ambiguous: {0}")]
    Ambiguous(#[from] Ambiguous),
    #[error("the upstream proxy does not accept proxyd's user and password, or has none (407)")]
    ProxyAuthentication,
    #[error("upstream switched protocols without being asked")]
    Unasked,
    #[error("{}", describe(.0))]
    Reset(h2::Error),
}

/// The answer to one request.
pub enum Answer<'a> {
    H1(h1::client::Awaited<'a>),
    H2(h2::client::ResponseFuture),
}

/// What follows a head.
pub enum Next<'a> {
    /// The head was an interim one (1xx); the answer is still to come.
    Interim(Answer<'a>),
    Switched(BodyIn<'a>),
    Body(BodyIn<'a>, Framing),
}

impl<'a> Answer<'a> {
    /// Waits for the next head.
    pub async fn head(self) -> Result<(ResponseHead, Next<'a>), AnswerError> {
        match self {
            Self::H1(awaited) => {
                let (head, next) = awaited.head().await?;
                let next = match next {
                    h1::client::Next::Interim(awaited) => Next::Interim(Self::H1(awaited)),
                    h1::client::Next::Switched(body) => Next::Switched(body),
                    h1::client::Next::Body(body, framing) => Next::Body(body, framing),
                };
                Ok((head, next))
            }
            Self::H2(response) => h2_head(response).await,
        }
    }
}

async fn h2_head<'a>(
    mut response: h2::client::ResponseFuture,
) -> Result<(ResponseHead, Next<'a>), AnswerError> {
    enum Got {
        Interim(http::Response<()>),
        Final(http::Response<h2::RecvStream>),
    }
    let got = poll_fn(|context| {
        if let Poll::Ready(Some(interim)) = response.poll_informational(context) {
            return Poll::Ready(interim.map(Got::Interim));
        }
        std::pin::Pin::new(&mut response).poll(context).map_ok(Got::Final)
    })
    .await
    .map_err(AnswerError::Reset)?;
    match got {
        Got::Interim(interim) => {
            let head = convert::response_head(&interim.into_parts().0);
            Ok((head, Next::Interim(Answer::H2(response))))
        }
        Got::Final(answer) => {
            let (parts, stream) = answer.into_parts();
            let head = convert::response_head(&parts);
            let body = BodyIn::h2(stream);
            let framing = match (&body, framing::content_length(&head.headers)?) {
                (BodyIn::Empty, _) => Framing::None,
                (_, Some(length)) => Framing::Length(length),
                (_, None) => Framing::Chunked,
            };
            Ok((head, Next::Body(body, framing)))
        }
    }
}
