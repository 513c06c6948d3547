import MLXInferClient

let server = LocalServer(ServerCommand(["smollm2"]))
try await server.start()
let answer = try await server.client.respond(to: "Hello")
print(answer.text)
await server.stop()
