import Foundation
import Testing

@testable import MLXInferClient

/// Many streams, slow views, cancelled tasks, a machine that sleeps, a server that restarts.
extension LiveTests.Robustness {
    private struct Pair: GuidedObject, Decodable, Sendable {
        let word: String
        let number: Int
        static var properties: [Property<Pair>] {
            Property("word", \.word, .string(maxLength: 4))
            Property("number", \.number, .integer(in: 0...9))
        }
    }

    /// A thousand numbers, which take longer than any test waits.
    private struct Numbers: JSONSchemaProviding, Decodable, Sendable {
        static let jsonSchema = JSONSchema.array(of: .integer(in: 0...99), count: 1000...1000)
        init(from decoder: any Decoder) throws {}
    }

    private var server: LiveServer { LiveServer.shared }

    private func endless(_ tokens: Int) -> ChatRequest {
        var request = ChatRequest([.user("Tell me a long story.")], options: SamplingOptions(maxTokens: tokens, temperature: 1, seed: 1))
        request.additionalFields = ["ignore_eos": true]
        return request
    }

    @Test func fiftyStreamsAtTheSameTime() async throws {
        let client = server.client
        try await client.waitUntilReady()
        let before = try openDescriptors()
        let most = Locked(0)
        let pairs = try await withThrowingTaskGroup(of: Pair?.self) { group in
            for seed in 0..<50 {
                group.addTask {
                    var last: Snapshot<Pair>?
                    let options = SamplingOptions(maxTokens: 60, temperature: 1, seed: seed)
                    for try await snapshot in client.stream(Pair.self, "A word and a number, as JSON", options: options) {
                        if last == nil {
                            let open = try openDescriptors()
                            most.withLock { $0 = max($0, open) }
                        }
                        last = snapshot
                    }
                    return last?.value
                }
            }
            return try await group.reduce(into: []) { $0.append($1) }
        }
        #expect(pairs.count == 50 && pairs.allSatisfy { $0 != nil })
        #expect(try await eventually { try openDescriptors() <= before + 20 })
        print("50 streams: at most \(most.withLock { $0 } - before) descriptors more than before")
    }

    @Test func cancelledStreamsLeaveNothing() async throws {
        let client = server.client
        try await client.waitUntilReady()
        let before = try openDescriptors()
        let request = endless(1500)
        let ends = await withTaskGroup(of: (any Error)?.self) { group in
            for number in 0..<50 {
                group.addTask {
                    let task = Task {
                        if number % 2 == 0 {
                            for try await _ in client.chat(request) {}
                        } else {
                            for try await _ in client.stream(Numbers.self, "Numbers", options: SamplingOptions(maxTokens: 3000)) {}
                        }
                    }
                    try? await Task.sleep(for: .milliseconds(4 * number))
                    task.cancel()
                    return await task.result.error
                }
            }
            return await group.reduce(into: []) { $0.append($1) }
        }
        #expect(ends.count == 50)
        for end in ends { #expect(end is CancellationError, "\(String(describing: end))") }
        #expect(try await eventually { try openDescriptors() <= before + 20 })
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
        #expect(try await eventually { try await server.metric("mlxinfer_kv_cache_pages_used") == 0 })
    }

    @Test func aReaderThatDoesNotReadHoldsUpNobody() async throws {
        let client = server.client
        let ended = try await server.metric("mlxinfer_num_requests_running")
        let events = client.chat(endless(48))
        #expect(await eventually { events.waiting > 2 })
        #expect(try await client.respond(to: "Hi", options: SamplingOptions(maxTokens: 2)).finishReason != nil)
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == ended })
        #expect(try await ChatResponse(collecting: events).usage?.completionTokens == 48)
    }

    @Test func aSleepInTheMiddleOfAnAnswer() async throws {
        let client = server.client
        let whole = try await client.respond(to: endless(24))
        var (answer, slept) = (ChatResponse(), false)
        for try await event in client.chat(endless(24)) {
            answer.add(event)
            guard case .text = event, !slept else { continue }
            slept = true
            try server.signal("STOP")
            try await Task.sleep(for: .milliseconds(300))
            try server.signal("CONT")
        }
        #expect(slept && answer.text == whole.text)
    }

    @Test func aServerThatDoesNotWakeIsGivenUp() async throws {
        var client = server.client
        client.model = LiveServer.model
        try await client.waitUntilReady()
        try server.signal("STOP")
        client.timeouts.silence = .milliseconds(200)
        let (_, error) = await gather(client.chat(endless(24)))
        try server.signal("CONT")
        #expect(error == .timedOut(.answer, partial: ""))
        #expect(try await eventually { try await server.metric("mlxinfer_num_requests_running") == 0 })
        #expect(try await server.client.respond(to: endless(4)).usage?.completionTokens == 4)
    }

    #if os(Linux)
        /// Listens as launchd does, starts the command at a connection, and again after its end.
        private static let launchd = #"""
            import os, select, socket, sys
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(sys.argv[1])
            os.chmod(sys.argv[1], 0o600)
            listener.listen(16)
            while True:
                select.select([listener], [], [])
                child = os.fork()
                if not child:
                    os.dup2(listener.fileno(), 3)
                    os.set_inheritable(3, True)
                    os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
                    os.execvp(sys.argv[2], sys.argv[2:])
                os.waitpid(child, 0)
            """#

        @Test @MainActor func aServerThatIsRestartedBetweenTwoMessages() async throws {
            let path = LiveServer.freshSocket()
            let launchd = Process()
            launchd.executableURL = URL(fileURLWithPath: "/usr/bin/env")
            launchd.arguments =
                ["python3", "-c", Self.launchd, path] + (LiveServer.command ?? []) + ["serve", LiveServer.model, "--activated"]
            (launchd.standardOutput, launchd.standardError) = (FileHandle.nullDevice, FileHandle.nullDevice)
            try launchd.runWithSignals()
            func child() throws -> Int32? {
                Int32(try LiveServer.shell("pgrep -P \(launchd.processIdentifier)").trimmingCharacters(in: .whitespacesAndNewlines))
            }
            let conversation = Conversation(Client(.unix(path: path), reconnect: Reconnect(upTo: .seconds(30))))
            conversation.request.options = LiveTests.exact
            conversation.send("What is the capital of France?")
            await conversation.settled()
            #expect(conversation.messages.last?.content.contains("Paris") == true && conversation.failure == nil)
            let first = try #require(try child())
            kill(first, SIGTERM)
            #expect(try await eventually { try child() != first })
            conversation.send("And of Italy?")
            await conversation.settled()
            #expect(conversation.failure == nil && conversation.messages.count == 4 && conversation.messages.last?.role == .assistant)
            let second = try #require(try child())
            #expect(second != first)
            launchd.terminate()
            kill(second, SIGTERM)
            launchd.waitUntilExit()
        }
    #endif
}

extension Result {
    /// The error; nil for a success.
    fileprivate var error: Failure? { if case .failure(let error) = self { error } else { nil } }
}
