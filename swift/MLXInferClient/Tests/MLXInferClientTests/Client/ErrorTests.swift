import Foundation
import Testing

@testable import MLXInferClient

struct ErrorTests {
    @Test(arguments: [
        (
            #"{"error":{"message":"No such model.","type":"not_found_error","param":"model","code":"model_not_found"}}"#,
            APIError(status: 404, type: "not_found_error", code: "model_not_found", param: "model", message: "No such model.")
        ),
        (#"{"error":{"message":"busy","code":429},"more":1}"#, APIError(status: 404, code: "429", message: "busy")),
        (#"{"error":"plain"}"#, APIError(status: 404, message: "plain")),
        (#"{"detail":"Not Found"}"#, APIError(status: 404, message: "Not Found")),
        (#"{"detail":[{"loc":["body"]}]}"#, APIError(status: 404, message: #"[{"loc":["body"]}]"#)),
        (#"{"error":{}}"#, APIError(status: 404, message: "no reason given")),
        ("<html>Bad Gateway</html>", APIError(status: 404, message: "<html>Bad Gateway</html>")),
        ("", APIError(status: 404, message: "Not Found")),
    ])
    func errorsOfEveryShape(_ body: String, _ expected: APIError) async throws {
        let server = try FaultServer([.read, .send(Transcript.json(body, status: "404 Not Found"))])
        #expect(await gather(server.client.chat([.user("Hi")])).error == .api(expected))
        await #expect(throws: MLXInferError.api(expected)) { try await server.client.models() }
        await #expect(throws: MLXInferError.api(expected)) { try await server.client.respond(to: "Hi") }
        await #expect(throws: MLXInferError.api(expected)) { try await server.client.complete("Hi") }
    }

    @Test func whatTheHeaderSaysOfAnError() async throws {
        let body = #"{"error":{"message":"busy"}}"#
        let server = try FaultServer([
            .read, .send(Transcript.json(body, status: "503 x", fields: "Retry-After: 7\r\nX-Request-Id: r1\r\n")),
        ])
        let expected = APIError(status: 503, message: "busy", requestID: "r1", retryAfter: 7)
        await #expect(throws: MLXInferError.api(expected)) { try await server.client.models() }
    }

    @Test func anErrorThatEndsAStream() async throws {
        let error = #"data: {"error":{"message":"no memory","type":"server_error","code":null,"param":null}}"# + "\n\n"
        let server = try FaultServer([.read, .send(Transcript.stream(Array(Transcript.chatEvents.prefix(4)) + [error]))])
        let result = await gather(server.client.chat([.user("Hi")]))
        #expect(result.events == Array(Transcript.chatMeaning.prefix(3)))
        #expect(result.error == .api(APIError(status: 200, type: "server_error", message: "no memory", requestID: "r1")))
    }

    @Test func nothingListens() async throws {
        let path = FaultServer.freshPath()
        let client = Client(.unix(path: path), reconnect: .never)
        await #expect(throws: MLXInferError.serverNotRunning(path)) { try await client.models() }
        #expect(await gather(client.chat([.user("Hi")])).error == .serverNotRunning(path))
        let stale = try FaultServer.stalePath()
        defer { try? FileManager.default.removeItem(atPath: stale) }
        let left = Client(.unix(path: stale), reconnect: .never)
        await #expect(throws: MLXInferError.serverNotRunning(stale)) { try await left.models() }
        await #expect(throws: MLXInferError.serverNotRunning("127.0.0.1:1")) { try await Client(.tcp(port: 1), reconnect: .never).models() }
    }

    @Test func placesThatAreNoSockets() async throws {
        let long = "/tmp/" + String(repeating: "x", count: 120)
        let tooLong = MLXInferError.socketPathTooLong(path: long, limit: System.pathLimit)
        await #expect(throws: tooLong) { try await Client(.unix(path: long)).models() }
        for path in ["", "/tmp", "/tmp/a\u{0}b", "/etc/hosts/x"] {
            await #expect(throws: MLXInferError.self) { try await Client(.unix(path: path), reconnect: .never).models() }
        }
        await #expect(throws: MLXInferError.self) { try await Client(.tcp(host: "no.such.host.invalid"), reconnect: .never).models() }
    }

    @Test(.disabled(if: getuid() == 0, "root may connect to every socket"))
    func aSocketOfSomebodyElse() async throws {
        let server = try FaultServer([.read])
        try FileManager.default.setAttributes([.posixPermissions: 0], ofItemAtPath: server.path)
        await #expect(throws: MLXInferError.permissionDenied(server.path)) { try await server.client.models() }
    }

    @Test func aRequestThatCannotBeWritten() async throws {
        let server = try FaultServer([.read])
        let error = await gather(server.client.chat([.user("Hi")], options: SamplingOptions(temperature: .nan))).error
        #expect(error == .invalidRequest("JSON cannot express the number nan"))
        #expect(server.requests.isEmpty)
    }

    @Test func errorsAreWordedForPeople() {
        let api = APIError(status: 400, type: "invalid_request_error", param: "top_p", message: "too large")
        #expect(MLXInferError.api(api).localizedDescription == "too large")
        #expect(MLXInferError.serverNotRunning("/a.sock").localizedDescription.contains("mlxinfer serve"))
    }
}
