import MLXInferClient

let server = LocalServer(ServerCommand(["smollm2"]))
let watching = Task {
    for await state in await server.states() {
        switch state {
        case .stopped: print("stopped")
        case .starting: print("loading the model")
        case .ready(let ours): print(ours ? "started by this app" : "found")
        case .restarting(let pause, let reason): print("again in \(pause): \(reason)")
        case .failed(let error): print(error.localizedDescription)
        }
    }
}
try await server.start()
let answer = try await server.client.respond(to: "Hello")
print(answer.text)
await server.stop()
watching.cancel()
