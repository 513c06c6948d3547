import MLXInferClient

let agent = LaunchAgent(ServerCommand(["smollm2"]))
try await agent.install()
try await agent.client.waitUntilReady()
let answer = try await agent.client.respond(to: "Hello")
print(answer.text)
