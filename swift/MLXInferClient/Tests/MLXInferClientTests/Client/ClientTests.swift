import Foundation
import Testing

@testable import MLXInferClient

struct ClientTests {
    @Test func wholeAnswers() async throws {
        let server = try FaultServer([.read, .send(Transcript.chat)])
        let answer = try await server.client.respond(to: "Hi", options: SamplingOptions(maxTokens: 3))
        #expect(answer.text == "Grüße 🙂" && answer.finishReason == .stop && answer.usage?.cachedTokens == 3)
        #expect(answer.model == "tiny" && answer.message == .assistant("Grüße 🙂"))
        let request = try #require(server.requests.first)
        #expect(request.hasPrefix("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"))
        #expect(request.hasSuffix(ChatRequest([.user("Hi")], options: SamplingOptions(maxTokens: 3)).json(model: "tiny").description))
    }

    @Test func theFirstModelWhereNoneIsNamed() async throws {
        let server = try FaultServer([.read, .send(Transcript.models)], [.read, .send(Transcript.chat)])
        var client = server.client
        client.model = nil
        _ = try await client.respond(to: "Hi")
        #expect(
            server.requests.map { String($0.prefix { $0 != "\r\n" }) } == ["GET /v1/models HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"])
        #expect(server.requests.last?.contains(#""model":"tiny""#) == true)
    }

    @Test func modelsHealthAndMetrics() async throws {
        let health = Transcript.json(#"{"status":"ok","version":"1","models":["tiny"],"uptime":3}"#)
        let server = try FaultServer(
            [.read, .send(Transcript.models)], [.read, .send(health)], [.read, .send("HTTP/1.1 200 OK\r\n\r\na_total 1\n".bytes)])
        #expect(try await server.client.models() == [Model(id: "tiny", maxTokens: 64)])
        #expect(try await server.client.health() == Health(status: "ok", version: "1", models: ["tiny"]))
        #expect(try await server.client.metrics() == "a_total 1\n")
    }

    @Test func answersOfATypeAskForItsSchema() async throws {
        struct Point: Decodable, Equatable {
            var x: Int
        }
        let schema: JSONValue = ["type": "object", "properties": ["x": ["type": "integer"]]]
        let text = Transcript.delta(#"{"content":"{\"x\": 3}"}"#)
        let server = try FaultServer([
            .read, .send(Transcript.stream([text, Transcript.delta("{}", finish: #""stop""#), Transcript.done])),
        ])
        #expect(try await server.client.respond(to: ChatRequest([.user("Hi")]), as: Point.self, schema: schema) == Point(x: 3))
        let format = #""response_format":{"type":"json_schema","json_schema":{"name":"Point","schema":\#(schema),"strict":true}}"#
        #expect(server.requests.first?.contains(format) == true)
    }

    @Test func manyAtOnceWaitWithoutHoldingUpOtherTasks() async throws {
        let server = try FaultServer([.read, .hold])
        let client = server.client
        let waiting = (0..<24).map { _ in Task { try await client.respond(to: "Hi") } }
        #expect(await eventually { server.requests.count == 24 })
        for task in waiting { task.cancel() }
        for task in waiting {
            await #expect(throws: CancellationError.self) { try await task.value }
        }
        #expect(await eventually { server.departures.count == 24 })
    }

    @Test func endpoints() {
        #expect(Endpoint.unix(path: "~/x.sock").description == NSHomeDirectory() + "/x.sock")
        #expect(Endpoint.tcp(port: 81, apiKey: "secret").description == "127.0.0.1:81")
        #expect(Endpoint.tcp(host: "::1", port: 81).hostHeader == "[::1]:81")
    }
}
