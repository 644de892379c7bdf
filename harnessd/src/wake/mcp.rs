//! MCP servers in a run: asked for their tools before the model is asked first in a turn, and when
//! one of them says that its tools changed. What they have stands in the log, so that every process
//! shows the model the same; one that fails is an error event, and the turn goes on without it.

use futures_util::future::join_all;

use super::*;
use crate::hands::{Listed, McpHand, Trouble, TroubleKind, model_name};
use crate::log::{McpServer, McpTarget};

impl Run {
    /// Whether the MCP servers are to be asked before the model is.
    pub(super) fn must_list_mcp(&self) -> bool {
        let Some(hand) = &self.mcp else { return false };
        if self.agent.mcp.is_empty() {
            // An agent that has lost its servers has lost their tools as well.
            return !self.mcp_tools.is_empty();
        }
        !self.state.mcp_listed || hand.take_changed()
    }

    /// Asks the agent's MCP servers for their tools, and appends what came of it.
    pub(super) async fn list_mcp(&mut self) -> Result<(), WakeError> {
        let Some(hand) = self.mcp.clone() else { return Ok(()) };
        let servers = self.agent.mcp.clone();
        let asked = join_all(servers.iter().map(|server| hand.tools(&server.url)));
        let answers = tokio::select! {
            biased;
            answers = asked => answers,
            outcome = self.interrupted() => return Ok(outcome?),
            () = self.parts.stop.cancelled() => return Err(WakeError::Stopped),
        };
        // What a server says while it lists is about that list: one that says it each time would be
        // asked for ever.
        let _ = hand.take_changed();
        let mut batch: Vec<NewEvent> = Vec::new();
        let mut tools = Vec::new();
        for (server, answer) in servers.iter().zip(answers) {
            match answer {
                Ok(listed) => add(server, listed, &mut tools),
                Err(trouble) => batch.push(error(server, &trouble).into()),
            }
        }
        let tools = (tools != self.mcp_tools).then_some(tools);
        batch.push(Body::McpListed { tools }.into());
        Ok(self.append(batch).await?)
    }

    /// Puts the tools of MCP servers behind the agent's own.
    pub(super) fn put_mcp_tools(&mut self, tools: Vec<Tool>) {
        self.mcp_tools = tools;
        self.agent.tools.retain(|tool| !matches!(tool, Tool::Mcp { .. }));
        self.agent.tools.extend(self.mcp_tools.iter().cloned());
    }

    /// The hand and the address for a call of an MCP tool; none: another hand's call.
    pub(super) fn mcp_way(&self, call: &PendingCall) -> Option<(Arc<McpHand>, String, String)> {
        let target = call.used.mcp.as_ref()?;
        let server = self.agent.mcp.iter().find(|server| server.name == target.server);
        // An agent that has lost the server since has no address for it, which the hand refuses.
        let url = server.map(|server| server.url.clone()).unwrap_or_default();
        Some((self.mcp.clone()?, url, target.tool.clone()))
    }
}

fn add(server: &McpServer, listed: Vec<Listed>, tools: &mut Vec<Tool>) {
    let mut taken: Vec<String> = tools.iter().map(|tool| tool.name().to_owned()).collect();
    for Listed { name: tool, description, input_schema } in listed {
        let own = server.configs.iter().find(|(name, _)| *name == tool);
        let setting = own.map_or(server.default, |(_, setting)| *setting);
        if !setting.enabled {
            continue;
        }
        let name = model_name(&server.name, &tool, &taken);
        taken.push(name.clone());
        let target = McpTarget { server: server.name.clone(), tool };
        let permission = setting.permission;
        tools.push(Tool::Mcp { name, description, input_schema, permission, target });
    }
}

fn error(server: &McpServer, trouble: &Trouble) -> Body {
    let error = match trouble.kind {
        TroubleKind::Authentication => ErrorKind::McpAuthenticationFailed,
        _ => ErrorKind::McpConnectionFailed,
    };
    let message = format!(
        "MCP server {:?} at {}: {trouble}\nthe session goes on without its tools; it is asked \
         again when the next turn begins",
        server.name, server.url
    );
    let mcp_server = Some(server.name.clone());
    Body::Error { error, message, retry: Retry::Retrying, mcp_server }
}
