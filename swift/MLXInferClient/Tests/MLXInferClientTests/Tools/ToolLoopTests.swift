import Foundation
import Testing

@testable import MLXInferClient

struct ToolLoopTests {
    struct Place: GuidedObject, Decodable {
        let city: String
        static var properties: [Property<Place>] { Property("city", \.city, .string(maxLength: 12)) }
    }

    struct NoSuchCity: Error {}

    private let weather = CallableTool("weather", "The weather in a city") { (place: Place) in
        guard place.city != "Atlantis" else { throw NoSuchCity() }
        return "21 degrees in \(place.city)"
    }
    private let clock = CallableTool("clock", "The time") { (place: [String: String]) in ["hour": 12] }
    private let request = ChatRequest([.user("Hi")])

    @Test func aLoop() async throws {
        let first = Transcript.calls(("weather", #"{"city":"Rome"}"#), ("clock", "{}"))
        let server = try FaultServer([.read, first], [.read, .send(Transcript.chat)])
        var (request, events) = (request, [ToolEvent]())
        request.toolChoice = .required
        for try await event in server.client.chat(request, calling: [weather, clock]) { events.append(event) }
        var run = ToolRun()
        for event in events { run.add(event) }
        #expect(run.response.text == "Grüße 🙂" && run.response.usage?.cachedTokens == 3)
        #expect(run.results.map(\.parts) == [[.text("21 degrees in Rome")], [.text(#"{"hour":12}"#)]])
        #expect(run.messages.map(\.role) == [.assistant, .tool, .tool, .assistant])
        let (before, after) = (server.requests[0], server.requests[1])
        #expect(before.contains(#""tool_choice":"required""#) && before.contains(#""strict":true"#) && before.contains(#""name":"clock""#))
        #expect(after.contains(#""tool_choice":"auto""#))
        #expect(after.contains(#"{"role":"tool","content":"21 degrees in Rome","tool_call_id":"c0"}"#))
        #expect(events.filter { if case .calling = $0 { true } else { false } }.count == 1)
    }

    @Test func failuresAreHandedToTheModel() async throws {
        let first = Transcript.calls(("weather", #"{"city":"Atlantis"}"#), ("weather", "{"), ("nothing", "{}"))
        let server = try FaultServer([.read, first], [.read, .send(Transcript.chat)])
        let run = try await server.client.respond(to: request, calling: [weather], policy: ToolPolicy(runsConcurrently: false))
        #expect(run.results.map(\.isFailure) == [true, true, true] && run.response.finishReason == .stop)
        let texts = run.results.map(\.message.content)
        #expect(texts[0] == "error: NoSuchCity()" && texts[1].contains("not valid JSON") && texts[2].contains("no tool named nothing"))
        #expect(server.requests[1].contains("error: NoSuchCity()"))
    }

    @Test func failuresAreThrown() async throws {
        let server = try FaultServer([.read, Transcript.calls(("weather", #"{"city":"Atlantis"}"#))])
        await #expect(throws: NoSuchCity.self) {
            try await server.client.respond(to: request, calling: [weather], policy: ToolPolicy(onFailure: .throw))
        }
        #expect(server.requests.count == 1)
    }

    @Test func roundsHaveALimit() async throws {
        let server = try FaultServer([.read, Transcript.calls(("weather", #"{"city":"Rome"}"#))])
        await #expect(throws: MLXInferError.tooManyToolRounds(3)) {
            try await server.client.respond(to: request, calling: [weather], policy: ToolPolicy(maxRounds: 3))
        }
        #expect(server.requests.count == 4)
    }

    @Test func theLastAnswerMayBeWithoutCalls() async throws {
        let first = Transcript.calls(("weather", #"{"city":"Rome"}"#))
        let server = try FaultServer([.read, first], [.read, first], [.read, .send(Transcript.chat)])
        let run = try await server.client.respond(to: request, calling: [weather], policy: ToolPolicy(maxRounds: 2, onLimit: .answer))
        #expect(run.response.text == "Grüße 🙂" && run.results.count == 2)
        #expect(server.requests.map { $0.contains(#""tool_choice":"none""#) } == [false, false, true])
    }

    @Test(arguments: [true, false])
    func cancellingReachesTheTool(_ streams: Bool) async throws {
        let server = try FaultServer([.read, Transcript.calls(("wait", "{}"))])
        let (begun, ended) = (Locked(false), Locked(false))
        let wait = CallableTool("wait", "Waits") { (_: [String: String]) in
            begun.withLock { $0 = true }
            defer { ended.withLock { $0 = true } }
            try await Task.sleep(for: .seconds(1000))
            return ""
        }
        let (client, request) = (server.client, request)
        let task = Task {
            if streams {
                for try await _ in client.chat(request, calling: [wait]) {}
            } else {
                _ = try await client.respond(to: request, calling: [wait])
            }
        }
        #expect(await eventually { begun.withLock { $0 } })
        task.cancel()
        await #expect(throws: CancellationError.self) { try await task.value }
        #expect(await eventually { ended.withLock { $0 } })
        #expect(server.requests.count == 1)
    }

    @Test func aTypedAnswerAfterACall() async throws {
        let answer = Transcript.stream([
            Transcript.delta(#"{"content":"{\"city\":\"Ro"}"#), Transcript.delta(#"{"content":"me\"}"}"#),
            Transcript.delta("{}", finish: #""stop""#), Transcript.usage, Transcript.done,
        ])
        let first = Transcript.calls(("weather", #"{"city":"Rome"}"#))
        let server = try FaultServer([.read, first], [.read, .send(answer)], [.read, first], [.read, .send(answer)])
        #expect(try await server.client.generate(Place.self, request, calling: [weather]).city == "Rome")
        var last: Snapshot<Place>?
        for try await snapshot in server.client.stream(Place.self, request, calling: [weather]) { last = snapshot }
        #expect(last?.value?.city == "Rome" && last?.content.city == "Rome" && last?.response.usage != nil)
        #expect(server.requests[1].contains("json_schema"))
    }

    @Test func manyCallsKeepTheirOrder() async throws {
        let tool = CallableTool("delay", "Waits") { (arguments: [String: Int]) in
            try await Task.sleep(for: .milliseconds(20 - 2 * (arguments["n"] ?? 0)))
            return "\(arguments["n"] ?? 0)"
        }
        let calls = (0..<8).map { ToolCall(id: "\($0)", name: "delay", arguments: #"{"n":\#($0)}"#) }
        let results = try await ToolPolicy().run(calls, with: [tool])
        #expect(results.map(\.message.content) == (0..<8).map { "\($0)" } && results.map(\.call.id) == calls.map(\.id))
    }
}
